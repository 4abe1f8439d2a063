# The native core and its tests for 64-bit ARM, from another processor. Debian and its kin:
#   apt-get install g++-aarch64-linux-gnu qemu-user
#   cmake -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake \
#     -DHEADRACE_PYTHON=OFF -DHEADRACE_NATIVE_TESTS=ON
# ctest then runs them under qemu; QEMU_CPU chooses the processor, for example neoverse-n1.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Static, so that qemu needs no root of ARM libraries.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
find_program(HEADRACE_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(HEADRACE_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${HEADRACE_QEMU})
endif()
