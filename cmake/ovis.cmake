# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Target `ovis_tiler`: the bicubic tiler of the Ovis models, a plain C library without
# Python, so that one build serves every interpreter. Needs nothing but threads.

find_package(Threads REQUIRED)

file(GLOB OVIS_TILER_SOURCES CONFIGURE_DEPENDS
     "${CMAKE_CURRENT_LIST_DIR}/../csrc/ovis/*.cpp")

add_library(ovis_tiler SHARED ${OVIS_TILER_SOURCES})

# -O3 whatever the build type: the kernels live from unrolling, which -O2 leaves out.
# Without contraction, because a fused multiply-add would round coefficients otherwise.
target_compile_options(ovis_tiler PRIVATE -O3 -ffp-contract=off)
target_compile_features(ovis_tiler PRIVATE cxx_std_17)
set_target_properties(ovis_tiler PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  POSITION_INDEPENDENT_CODE ON)
# The C++ runtime of the build machine may be newer than that of the user's.
target_link_options(ovis_tiler PRIVATE
  -static-libstdc++ -static-libgcc LINKER:--exclude-libs,ALL)
target_link_libraries(ovis_tiler PRIVATE Threads::Threads)

install(TARGETS ovis_tiler LIBRARY DESTINATION vllm/models/ovis COMPONENT ovis_tiler)
