include(GNUInstallDirs)

find_program(TERSOR_CCACHE ccache)
if(TERSOR_TOP_LEVEL AND TERSOR_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers are cached too when their times and macros are not part of the key.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime;${TERSOR_CCACHE}")
endif()

set(TERSOR_VENV "${CMAKE_CURRENT_SOURCE_DIR}/.venv" CACHE PATH "Python environment whose torch wheel is used when no other LibTorch is given")
find_package(Torch 2.4 QUIET)
if(NOT Torch_FOUND)  # none named by Torch_DIR or CMAKE_PREFIX_PATH
  file(GLOB TERSOR_WHEEL_CMAKE "${TERSOR_VENV}/lib/python3*/site-packages/torch/share/cmake")
  list(APPEND CMAKE_PREFIX_PATH "${TERSOR_WHEEL_CMAKE}")
  find_package(Torch 2.4 REQUIRED)
endif()
find_package(Eigen3 3.3 REQUIRED NO_MODULE)
find_package(fmt REQUIRED)
find_package(nlohmann_json 3 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(ZLIB REQUIRED)
find_package(Threads REQUIRED)

# Torch's own variable holds absolute paths; this name does not, so exported targets can link to it.
add_library(tersor::torch INTERFACE IMPORTED GLOBAL)
target_link_libraries(tersor::torch INTERFACE ${TORCH_LIBRARIES})
target_include_directories(tersor::torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})

if(NOT TERSOR_TOP_LEVEL)  # the project around this one links our targets, so it must see theirs
  get_directory_property(found IMPORTED_TARGETS)
  foreach(target IN LISTS found)
    set_target_properties(${target} PROPERTIES IMPORTED_GLOBAL TRUE)
  endforeach()
endif()
