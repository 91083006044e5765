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
    set_source_files_properties(${alone} ${sources} DIRECTORY ${folder} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  endforeach()
endfunction()
cmake_language(DEFER CALL kvferry_join_models)
