// Descriptors of files and directories that close themselves, and the system's words for what fails.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvpool {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // For a new owner that closes it (fdopendir).
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(fd_);  // errno stays the caller's: nothing here reads it
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// False for what waits or never ends: pipes, terminals, devices.
inline bool is_regular(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

inline std::string words_of(int error_number) { return std::generic_category().message(error_number); }

[[noreturn]] inline void fail(const char* what, const std::string& path, int error_number) {
  throw std::filesystem::filesystem_error(what, path, std::error_code(error_number, std::generic_category()));
}

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};
// A directory opened for reading.
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
