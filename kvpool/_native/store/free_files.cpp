// Lists, takes and deletes evicted files. See free_files.h.
#include "store/free_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <string_view>

#include "store/descriptor.h"
#include "store/record_file.h"

namespace kvpool {
namespace {

// {bytes}.{random}
bool is_free_name(std::string_view name) {
  std::uint64_t number = 0;
  const char* const end = name.data() + name.size();
  const auto [dot, error] = std::from_chars(name.data(), end, number);
  if (error != std::errc{} || dot == end || *dot != '.') return false;
  const auto [last, other] = std::from_chars(dot + 1, end, number);
  return other == std::errc{} && last == end;
}

}  // namespace

void FreeFiles::look() {
  known_.clear();
  const Folder folder = open_folder(AT_FDCWD, folder_.c_str());
  if (!folder) return;
  for_each_entry(folder, [&](const char* name) {
    struct stat info;
    if (!is_free_name(name) || fstatat(dirfd(folder.get()), name, &info, AT_SYMLINK_NOFOLLOW) != 0) return;
    // A file counts as what it has now: others may have cut it since it was named.
    if (S_ISREG(info.st_mode)) known_.push_back({file_nbytes(info), name});
  });
}

bool FreeFiles::take(std::uint64_t nbytes, const std::string& path) {
  for (bool looked = false;; looked = true) {
    for (;;) {
      const auto found = std::ranges::find(known_, nbytes, &File::nbytes);
      if (found == known_.end()) break;
      const std::string from = path_of(*found);
      std::swap(*found, known_.back());
      known_.pop_back();
      if (rename(from.c_str(), path.c_str()) == 0) return true;
    }
    if (looked) return false;
    look();
  }
}

int FreeFiles::give(const std::string& path, std::uint64_t nbytes) {
  File file{nbytes,
            std::to_string(nbytes) + "." + std::to_string(std::uint64_t{random_()} << 32 | random_())};
  if (rename(path.c_str(), path_of(file).c_str()) != 0) return errno;
  known_.push_back(std::move(file));
  return 0;
}

std::uint64_t FreeFiles::remove(std::uint64_t nbytes) {
  look();
  std::uint64_t left = 0;
  std::uint64_t gone = 0;
  for (const File& file : known_) {
    if (gone < nbytes && unlink(path_of(file).c_str()) == 0) {
      gone += file.nbytes;
    } else {
      left += file.nbytes;
    }
  }
  known_.clear();
  return left;
}

}  // namespace kvpool
