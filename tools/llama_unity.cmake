# SPDX-License-Identifier: Apache-2.0
#
# Read by the build of llama.cpp that ./dev llama makes: files of models, of which most of a compile is the same
# headers, are compiled sixteen at a time. The code is the same.
function(kvferry_join_models)
  foreach(target llama mtmd)
    get_target_property(sources ${target} SOURCES)
    get_target_property(folder ${target} SOURCE_DIR)
    set(alone ${sources})
    list(FILTER alone EXCLUDE REGEX "models/[a-z0-9_-]*\\.cpp$")
    list(FILTER sources INCLUDE REGEX "models/deepseek") # two of them name helpers alike
    foreach(source ${alone} ${sources})
      get_filename_component(source ${source} ABSOLUTE BASE_DIR ${folder}) # else it is looked for in this one
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  endforeach()
endfunction()
cmake_language(DEFER CALL kvferry_join_models)
