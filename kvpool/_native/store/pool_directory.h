// The directory of a file pool: whose it is, the marker by which it is known, and where records lie in it.
//
//   root/kvpool-pool     the marker: a line "kvpool pool, format N", and one for a person who finds it
//
// Nothing is written, and nothing deleted, in a directory that lacks it: an empty directory is given one, any
// other is refused. The format is that of the whole layout below root (file.h).
//
// A record lies in blocks/{bucket}/{tenant}.{namespace}.{hash}.{group}.{rank}. The bucket is the last three
// digits of the hash, so every bucket is a fair sample of the store.
#pragma once

#include <sys/types.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "key/record.h"

namespace kvpool {

struct PoolDirectory {
  dev_t device = 0;
  ino_t inode = 0;
  // Modes of its content: for its owner alone, or group-writable like the directory.
  mode_t directory_mode = 0;
  mode_t file_mode = 0;
};

// Why a directory is refused, and what to do, in one line without its name.
struct RefusedDirectory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Makes `root` a pool unless it is one. Safe for concurrent processes, killed at any point. `known`: from an
// earlier call; the same directory, emptied by another program except for our later files, becomes a pool
// again. Throws RefusedDirectory, or the system's std::filesystem::filesystem_error.
PoolDirectory make_pool(const std::string& root, const PoolDirectory& known = {});

// As make_pool() for an existing pool; writes nothing.
PoolDirectory find_pool(const std::string& root);

// Sets the times of the marker and the capacity: programs that clean up by age would delete them from a pool in use, and
// without its marker it is none.
void renew(const std::string& root);

// mkdir with the pool's mode, whatever the umask. Returns 0 or an errno; 0 if present.
int make_folder(const PoolDirectory& pool, const std::string& path);

unsigned bucket_of(const Key& key);
std::string bucket_path(const std::string& root, unsigned bucket);
std::string record_path(const std::string& root, const Key& key);
// Whether a record of this bucket may have this name.
bool is_record_name(unsigned bucket, std::string_view name);

}  // namespace kvpool
