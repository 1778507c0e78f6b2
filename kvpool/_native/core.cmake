# The native core without Python: shared by the extension module and by tests/native.

find_package(Threads REQUIRED)
find_package(OpenSSL COMPONENTS Crypto SSL)
if(NOT OpenSSL_FOUND)
  message(FATAL_ERROR "kvpool needs OpenSSL 3 (libcrypto, libssl): install libssl-dev (Debian, Ubuntu) or openssl-devel (Fedora, RHEL)")
endif()
if(OPENSSL_VERSION VERSION_LESS 3.0)
  message(FATAL_ERROR "kvpool needs OpenSSL 3, found ${OPENSSL_VERSION}: install a newer libssl-dev")
endif()
find_path(XXHASH_INCLUDE_DIR xxhash.h)
if(NOT XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR "kvpool needs xxhash.h: install libxxhash-dev (Debian, Ubuntu) or xxhash-devel (Fedora, RHEL)")
endif()

# Off for users: another compiler has other warnings.
option(KVPOOL_WERROR "Warnings are errors" OFF)
set(KVPOOL_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow $<$<BOOL:${KVPOOL_WERROR}>:-Werror>)

file(GLOB KVPOOL_CORE CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_LIST_DIR}/key/*.cpp ${CMAKE_CURRENT_LIST_DIR}/store/*.cpp
  ${CMAKE_CURRENT_LIST_DIR}/store/near_far/*.cpp ${CMAKE_CURRENT_LIST_DIR}/index/*.cpp)

# One translation unit per instruction set; checksum.cpp picks one when the program starts.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/key/checksum_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2")
  # GCC 12 warns of its own _mm512_undefined_epi32() (GCC bug 105593).
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/key/checksum_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
else()
  list(FILTER KVPOOL_CORE EXCLUDE REGEX "/checksum_avx[0-9]+\\.cpp$")
endif()

add_library(kvpool_core STATIC ${KVPOOL_CORE})
# UNITY_BUILD: eight files are compiled as one, as headers are most of what is compiled.
set_target_properties(kvpool_core PROPERTIES UNITY_BUILD ON
  CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
  POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_compile_options(kvpool_core PRIVATE ${KVPOOL_WARNINGS})
target_include_directories(kvpool_core PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_include_directories(kvpool_core SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
target_link_libraries(kvpool_core PUBLIC OpenSSL::SSL OpenSSL::Crypto Threads::Threads)
