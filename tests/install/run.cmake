# run(what command…): runs a command, fails with its output, leaves its output in OUTPUT.
macro(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE OUTPUT ERROR_VARIABLE OUTPUT)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${OUTPUT}")
  endif()
endmacro()

set(configure ${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_BUILD_TYPE=Release)
