// Reads and writes root/capacity.
#include "store/pool_capacity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <random>
#include <utility>

#include "store/descriptor.h"
#include "store/pool_directory.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kCapacityLook = 1s;
constexpr auto kRenew = 1h;
constexpr std::size_t kMaxCapacityFileNbytes = 4096;  // of the file
constexpr std::string_view kForPeople =
    "\nMost bytes of this pool, for all its processes: kvpool capacity shows and changes it.\n";

std::string capacity_path(const std::string& root) { return root + "/capacity"; }

}  // namespace

std::optional<std::uint64_t> read_capacity(const std::string& root) {
  const Descriptor file(open(capacity_path(root).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  std::array<char, kMaxCapacityFileNbytes> text;
  const ssize_t got = pread(file.get(), text.data(), text.size(), 0);
  if (got <= 0) return std::nullopt;
  const char* const end = text.data() + got;
  std::uint64_t nbytes = 0;
  const auto [behind, error] = std::from_chars(text.data(), end, nbytes);
  if (error != std::errc{} || behind == end || *behind != '\n') return std::nullopt;
  if (nbytes < kLeastCapacity || nbytes >= kUnlimited) return std::nullopt;
  return nbytes;
}

int write_capacity(const std::string& root, mode_t mode, std::uint64_t nbytes) {
  // No name of a record's temporary file, which others may delete.
  const std::string temporary =
      root + "/tmp/capacity." + std::to_string(getpid()) + "." + std::to_string(std::random_device()());
  const Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!file) return errno;
  if ((mode & S_IWGRP) != 0) fchmod(file.get(), mode);  // whatever the umask
  const std::string text = std::to_string(nbytes) + std::string(kForPeople);
  int error = 0;
  if (pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    error = ENOSPC;
  } else if (fsync(file.get()) != 0 || rename(temporary.c_str(), capacity_path(root).c_str()) != 0) {
    error = errno;
  }
  if (error != 0) unlink(temporary.c_str());
  return error;
}

PoolCapacity::PoolCapacity(std::string root, std::uint64_t own_nbytes)
    : root_(std::move(root)), limits_(own_nbytes < kUnlimited), nbytes_(own_nbytes) {}

std::uint64_t PoolCapacity::nbytes() {
  if (limits_ && Clock::now() >= look_at_.load(std::memory_order_relaxed)) look();
  return nbytes_.load(std::memory_order_relaxed);
}

std::uint64_t PoolCapacity::settle(std::uint64_t held_nbytes, mode_t mode) {
  if (!limits_) return kUnlimited;
  if (!read_capacity(root_)) {
    // Where it cannot be written, each process keeps to its own.
    [[maybe_unused]] const int ignored =
        write_capacity(root_, mode, std::max(nbytes_.load(std::memory_order_relaxed), held_nbytes));
  }
  look();
  return nbytes_.load(std::memory_order_relaxed);
}

// What was last known stays where none stands.
void PoolCapacity::look() {
  const Clock::time_point now = Clock::now();
  look_at_.store(now + kCapacityLook, std::memory_order_relaxed);
  if (now >= renew_at_.load(std::memory_order_relaxed)) {
    renew_at_.store(now + kRenew, std::memory_order_relaxed);
    renew(root_);
  }
  if (const auto found = read_capacity(root_)) nbytes_.store(*found, std::memory_order_relaxed);
}

}  // namespace kvpool
