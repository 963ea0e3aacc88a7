include(CMakePackageConfigHelpers)

# Relative only: no path of the machine that built it. CMAKE_INSTALL_RPATH may add where LibTorch is on the target machine.
set_target_properties(tersor_ops PROPERTIES INSTALL_RPATH "$ORIGIN;${CMAKE_INSTALL_RPATH}")
if(TARGET tersor_cli)
  set_target_properties(tersor_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${CMAKE_INSTALL_RPATH}")
endif()

set(TERSOR_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tersor)
install(TARGETS tersor tersor_ops tersor_core EXPORT tersorTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tersor DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT tersorTargets NAMESPACE tersor:: DESTINATION ${TERSOR_CMAKE_DIR})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/tersorConfig.cmake.in ${PROJECT_BINARY_DIR}/tersorConfig.cmake
  INSTALL_DESTINATION ${TERSOR_CMAKE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tersorConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tersorConfig.cmake ${PROJECT_BINARY_DIR}/tersorConfigVersion.cmake
  DESTINATION ${TERSOR_CMAKE_DIR})
