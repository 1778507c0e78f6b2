// The directory of a file pool: whose it is, and the marker by which it is known.
//
//   root/kvpool-pool     the marker: a line "kvpool pool, format N", and one for a person who finds it
//
// Nothing is written, and nothing deleted, in a directory that lacks it: an empty directory is given one, any
// other is refused. The format is that of the whole layout below root (file.h).
#pragma once

#include <sys/types.h>

#include <stdexcept>
#include <string>

namespace kvpool {

struct PoolDirectory {
  dev_t device = 0;
  ino_t inode = 0;
  // Modes of what is made in it: for its owner alone, or as a directory that its group may write says.
  mode_t directory_mode = 0;
  mode_t file_mode = 0;
};

// Why a directory is not taken, and what to do, in one line without the directory's name.
class RefusedDirectory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Makes `root` a pool unless it is one. Several processes may do so at once, and be killed at any point.
// `known`: what an earlier call returned. The same directory, emptied by another program but for what we have put
// into it meanwhile, is made a pool again.
// Throws RefusedDirectory; std::filesystem::filesystem_error where the system refuses.
PoolDirectory make_pool(const std::string& root, const PoolDirectory& known = {});

// The same for a pool that is there; writes nothing.
PoolDirectory find_pool(const std::string& root);

// mkdir with the pool's mode, whatever the umask. Returns 0 or an errno; 0 if it is there.
int make_folder(const PoolDirectory& pool, const std::string& path);

}  // namespace kvpool
