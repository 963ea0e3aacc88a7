# Builds and runs the consumer against the installed package.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
file(REMOVE_RECURSE ${WORK})
run("configuring the consumer" ${configure} -DCMAKE_PREFIX_PATH=${PREFIX} -DTorch_DIR=${TORCH_DIR})
run("building the consumer" ${CMAKE_COMMAND} --build ${WORK})
foreach(program with_core with_runtime with_tersor)
  run("${program}" ${WORK}/${program})
endforeach()
