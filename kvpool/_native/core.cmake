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

set(KVPOOL_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)

add_library(kvpool_core STATIC
  ${CMAKE_CURRENT_LIST_DIR}/checksum.cpp
  ${CMAKE_CURRENT_LIST_DIR}/checksum_baseline.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engine.cpp
  ${CMAKE_CURRENT_LIST_DIR}/events.cpp
  ${CMAKE_CURRENT_LIST_DIR}/evict.cpp
  ${CMAKE_CURRENT_LIST_DIR}/file.cpp
  ${CMAKE_CURRENT_LIST_DIR}/flatmap.cpp
  ${CMAKE_CURRENT_LIST_DIR}/hashing.cpp
  ${CMAKE_CURRENT_LIST_DIR}/holders.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lookup.cpp
  ${CMAKE_CURRENT_LIST_DIR}/pool_directory.cpp
  ${CMAKE_CURRENT_LIST_DIR}/record.cpp
  ${CMAKE_CURRENT_LIST_DIR}/record_file.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp_connection.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp_dial.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp_parser.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp_replies.cpp
  ${CMAKE_CURRENT_LIST_DIR}/resp_request.cpp
  ${CMAKE_CURRENT_LIST_DIR}/socket.cpp
  ${CMAKE_CURRENT_LIST_DIR}/spans.cpp
  ${CMAKE_CURRENT_LIST_DIR}/stream.cpp
  ${CMAKE_CURRENT_LIST_DIR}/table.cpp
  ${CMAKE_CURRENT_LIST_DIR}/table_image.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tls.cpp
  ${CMAKE_CURRENT_LIST_DIR}/topology.cpp
  ${CMAKE_CURRENT_LIST_DIR}/usage.cpp)

# One translation unit per instruction set; checksum.cpp picks one when the program starts.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(kvpool_core PRIVATE
    ${CMAKE_CURRENT_LIST_DIR}/checksum_avx2.cpp ${CMAKE_CURRENT_LIST_DIR}/checksum_avx512.cpp)
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/checksum_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2")
  # GCC 12 warns of its own _mm512_undefined_epi32() (GCC bug 105593).
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/checksum_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-Wno-maybe-uninitialized;-Wno-uninitialized")
endif()

set_target_properties(kvpool_core PROPERTIES
  CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
  POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_compile_options(kvpool_core PRIVATE ${KVPOOL_WARNINGS})
target_include_directories(kvpool_core PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_include_directories(kvpool_core SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
target_link_libraries(kvpool_core PUBLIC OpenSSL::SSL OpenSSL::Crypto Threads::Threads)
