// Checks a directory, makes it a pool, and finds it and its records again.
#include "store/pool_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>

#include "store/descriptor.h"
#include "store/usage.h"

namespace kvpool {
namespace {

constexpr const char* kMarkerName = "kvpool-pool";
constexpr std::string_view kMarkerStart = "kvpool pool, format ";
constexpr std::string_view kFirstLine = "kvpool pool, format 2\n";
constexpr std::string_view kMarker =
    "kvpool pool, format 2\n"
    "A cache: kvpool writes and deletes in this directory. Delete the whole directory to be rid of it.\n";
constexpr std::size_t kMaxMarkerNbytes = 4096;
constexpr std::array<const char*, 4> kFolders = {"tmp", "free", "blocks", "announcements"};
constexpr const char* kUsage = "usage";
constexpr const char* kCapacity = "capacity";
constexpr std::size_t kBucketDigits = 3;
static_assert(kBuckets == 1U << (4 * kBucketDigits));
constexpr std::string_view kPrefix = "kvpool:";  // of every key; its parts contain no '.' or '/'
constexpr unsigned kMostLinks = 40;              // behind each other, as in the kernel
constexpr mode_t kOwnersFolder = 0700;
constexpr mode_t kOwnersFile = 0600;
constexpr mode_t kGroupsFile = 0660;

enum class Marker { kNone, kUnfinished, kWhole };

constexpr const char* kCannot = "cannot use";

// Returns 0 or an errno.
int make_parents(const std::string& path) {
  if (mkdir(path.c_str(), 0777) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT) return errno;
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return ENOENT;
  if (const int error = make_parents(path.substr(0, slash)); error != 0) return error;
  return mkdir(path.c_str(), 0777) == 0 || errno == EEXIST ? 0 : errno;
}

// The owner of a link on the way decides where the pool is, and may decide anew at any time.
void check_links(const std::string& path, unsigned depth = 0) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    struct stat info;
    if (lstat(part.c_str(), &info) != 0) return;  // not there: it is still to be made, or opening it says why
    if (S_ISLNK(info.st_mode)) {
      if (info.st_uid != geteuid() && info.st_uid != 0) {
        throw RefusedDirectory(part + " is a symbolic link of user " + std::to_string(info.st_uid) +
                               ", who decides where it leads: name the directory itself");
      }
      std::array<char, PATH_MAX> target{};
      const ssize_t n = readlink(part.c_str(), target.data(), target.size());
      if (n > 0 && depth < kMostLinks) {
        const std::string to(target.data(), static_cast<std::size_t>(n));
        check_links(to.front() == '/' ? to : part.substr(0, part.rfind('/') + 1) + to, depth + 1);
      }
    }
    if (end == std::string::npos) return;
  }
}

Descriptor open_root(const std::string& root) {
  check_links(root);
  return Descriptor(open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

Descriptor open_or_make_root(const std::string& root) {
  check_links(root);
  const std::size_t slash = root.rfind('/');
  if (slash != std::string::npos && slash != 0) {
    if (const int error = make_parents(root.substr(0, slash)); error != 0) fail(kCannot, root, error);
  }
  if (mkdir(root.c_str(), kOwnersFolder) != 0 && errno != EEXIST) fail(kCannot, root, errno);
  Descriptor directory = open_root(root);
  if (!directory) fail(kCannot, root, errno);
  return directory;
}

// The owner and every writer can plant valid records and links to anywhere.
PoolDirectory judge(const std::string& root, int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) fail(kCannot, root, errno);
  const uid_t user = geteuid();
  if (info.st_uid != user && info.st_uid != 0) {
    throw RefusedDirectory(
        "it belongs to user " + std::to_string(info.st_uid) + " and this process is user " +
        std::to_string(user) + ": name a directory in it that is not there yet, or chown it to " +
        std::to_string(user) + " (to root, with group rights, where several users share it)");
  }
  if ((info.st_mode & S_IWOTH) != 0) {
    throw RefusedDirectory(
        "everyone may write in it: name a directory in it that is not there yet, or chmod o-w it");
  }
  const bool shared = (info.st_mode & S_IWGRP) != 0;
  return {info.st_dev, info.st_ino, shared ? info.st_mode & 07770 : kOwnersFolder,
          shared ? kGroupsFile : kOwnersFile};
}

Marker read_marker(const std::string& root, int fd) {
  const Descriptor file(openat(fd, kMarkerName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file && errno == ENOENT) return Marker::kNone;
  const std::string path = root + "/" + kMarkerName;
  if (!file && errno != ELOOP && errno != ENXIO) fail(kCannot, path, errno);
  struct stat info{};
  if (file && fstat(file.get(), &info) != 0) fail(kCannot, path, errno);
  std::string text(kMaxMarkerNbytes, '\0');
  ssize_t got = 0;
  if (S_ISREG(info.st_mode) && info.st_size <= static_cast<off_t>(kMaxMarkerNbytes)) {
    got = pread(file.get(), text.data(), text.size(), 0);
    if (got < 0) fail(kCannot, path, errno);
    text.resize(static_cast<std::size_t>(got));
    if (text.starts_with(kFirstLine)) return Marker::kWhole;
    if (kFirstLine.starts_with(text)) return Marker::kUnfinished;
    const std::size_t end = text.find('\n');
    const std::string format = text.substr(0, end).substr(std::min(text.size(), kMarkerStart.size()));
    if (text.starts_with(kMarkerStart) && end != std::string::npos && !format.empty() && format.size() < 10 &&
        std::all_of(format.begin(), format.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      throw RefusedDirectory("it is a pool of format " + format +
                             ", and this kvpool has format 2: name another directory, or delete this one");
    }
  }
  throw RefusedDirectory(
      "its file kvpool-pool is none that kvpool wrote: name another directory, or delete this one");
}

// A foreign entry of a future pool's directory; empty if none.
std::string stranger(const std::string& root, int fd, bool was_ours) {
  const Folder folder = open_folder(fd, ".");
  if (!folder) fail(kCannot, root, errno);
  std::string found;
  for_each_entry(folder, [&](const char* entry) {
    const std::string_view name = entry;
    const bool part = name == kUsage || name == kCapacity ||
                      std::find(kFolders.begin(), kFolders.end(), name) != kFolders.end();
    // lost+found: an ext4 file system's own.
    if (name != kMarkerName && name != "lost+found" && !(part && was_ours)) found = name;
  });
  return found;
}

void write_marker(const std::string& root, int fd, const PoolDirectory& pool) {
  const std::string path = root + "/" + kMarkerName;
  const Descriptor file(
      openat(fd, kMarkerName, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, pool.file_mode));
  if (!file) fail(kCannot, path, errno);
  const ssize_t written = pwrite(file.get(), kMarker.data(), kMarker.size(), 0);
  if (written != static_cast<ssize_t>(kMarker.size())) fail(kCannot, path, written < 0 ? errno : ENOSPC);
  if (pool.file_mode == kGroupsFile) fchmod(file.get(), kGroupsFile);
  // A power loss that took it, and left what is made next, would leave a directory that is no pool.
  fsync(file.get());
  fsync(fd);
}

// A link in its place would redirect every write and deletion.
void check_parts(const std::string& root, int fd) {
  struct stat info;
  for (const char* name : kFolders) {
    if (fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno != ENOENT) fail(kCannot, root + "/" + name, errno);
    } else if (!S_ISDIR(info.st_mode)) {
      throw RefusedDirectory("its " + std::string(name) +
                             " is no directory: delete that, or name another directory");
    }
  }
  if (fstatat(fd, kUsage, &info, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(info.st_mode))
    throw RefusedDirectory("its usage is no file: delete that, or name another directory");
}

[[noreturn]] void refuse_contents(Marker marker, const std::string& found) {
  if (marker == Marker::kUnfinished) {
    throw RefusedDirectory("its file kvpool-pool is cut short: name another directory, or delete this one");
  }
  std::string shown;
  for (const char c : found.substr(0, 64)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  throw RefusedDirectory("it is not empty (" + shown +
                         " is there) and has no file kvpool-pool, so it is no pool: correct the path; for a "
                         "new pool name a directory "
                         "that is empty or not there yet; delete this one only if an older kvpool made it");
}

}  // namespace

PoolDirectory make_pool(const std::string& root, const PoolDirectory& known) {
  const Descriptor directory = open_or_make_root(root);
  const PoolDirectory pool = judge(root, directory.get());
  if (const Marker marker = read_marker(root, directory.get()); marker != Marker::kWhole) {
    const bool was_ours = pool.device == known.device && pool.inode == known.inode;
    const std::string found = stranger(root, directory.get(), was_ours);
    if (found.empty()) {
      write_marker(root, directory.get(), pool);
    } else if (read_marker(root, directory.get()) != Marker::kWhole) {  // no other process has made it a pool
      refuse_contents(marker, found);
    }
  }
  check_parts(root, directory.get());
  for (const char* name : {"tmp", "free", "blocks"}) {
    const std::string path = root + "/" + name;
    int error = make_folder(pool, path);
    if (error == 0 && access(path.c_str(), R_OK | W_OK | X_OK) != 0) error = errno;
    if (error != 0) fail(kCannot, path, error);
  }
  return pool;
}

PoolDirectory find_pool(const std::string& root) {
  const Descriptor directory = open_root(root);
  if (!directory && errno == ENOENT) {
    throw RefusedDirectory(
        "there is no such directory: correct the path, or start a worker with it, which makes the pool");
  }
  if (!directory) fail(kCannot, root, errno);
  const PoolDirectory pool = judge(root, directory.get());
  if (const Marker marker = read_marker(root, directory.get()); marker != Marker::kWhole) {
    const std::string found = stranger(root, directory.get(), false);
    if (!found.empty()) refuse_contents(marker, found);
    throw RefusedDirectory("it is empty and no pool yet: correct the path, or start a worker with it");
  }
  check_parts(root, directory.get());
  return pool;
}

void renew(const std::string& root) {
  for (const char* name : {kMarkerName, kCapacity}) {
    utimensat(AT_FDCWD, (root + "/" + name).c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
  }
}

int make_folder(const PoolDirectory& pool, const std::string& path) {
  if (mkdir(path.c_str(), pool.directory_mode & 0777) != 0) return errno == EEXIST ? 0 : errno;
  if (pool.directory_mode != kOwnersFolder) chmod(path.c_str(), pool.directory_mode);
  return 0;
}

unsigned bucket_of(const Key& key) {
  unsigned bucket = 0;
  const char* const end = key.text.data() + key.hash_end;
  std::from_chars(end - kBucketDigits, end, bucket, 16);
  return bucket;
}

std::string bucket_path(const std::string& root, unsigned bucket) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string path = root + "/blocks/";
  for (unsigned shift = 4 * kBucketDigits; shift != 0; shift -= 4)
    path += kDigits[bucket >> (shift - 4) & 0xf];
  return path;
}

std::string record_path(const std::string& root, const Key& key) {
  std::string name = key.text.substr(kPrefix.size());
  std::replace(name.begin(), name.end(), ':', '.');
  return bucket_path(root, bucket_of(key)) + "/" + name;
}

bool is_record_name(unsigned bucket, std::string_view name) {
  std::string text(kPrefix);
  for (const char c : name) {
    if (c == ':') return false;
    text += c == '.' ? ':' : c;
  }
  try {
    return bucket_of(parse_key(text)) == bucket;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace kvpool
