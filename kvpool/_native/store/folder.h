// A directory opened for reading: closes itself, never follows a symbolic link.
#pragma once

#include <dirent.h>
#include <fcntl.h>

#include <memory>
#include <string_view>

#include "store/descriptor.h"

namespace kvpool {

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};
using Folder = std::unique_ptr<DIR, CloseFolder>;

// Null, with errno, for a link or an unreadable directory.
inline Folder open_folder(int at, const char* path) {
  Descriptor file(openat(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!file) return nullptr;
  Folder folder(fdopendir(file.get()));
  if (folder) file.release();
  return folder;
}

template <typename Visit>
void for_each_entry(const Folder& folder, Visit visit) {
  while (const dirent* entry = readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") visit(entry->d_name);
  }
}

}  // namespace kvpool
