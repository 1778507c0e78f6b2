#include "usage.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kOpenPatience = 10s;  // a pass over a very large tree may be under way

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  throw std::filesystem::filesystem_error(what, path, std::error_code(error, std::generic_category()));
}

}  // namespace

Usage::Lock::~Lock() {
  if (fd_ >= 0) flock(fd_, LOCK_UN);
}

void Usage::Unmap::operator()(UsagePage* page) const { munmap(page, sizeof(UsagePage)); }

Usage::Usage(std::string path) : path_(std::move(path)) {
  file_ = Descriptor(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0660));
  if (!file_) fail("open", path_, errno);
  struct stat info;
  if (fstat(file_.get(), &info) != 0) fail("stat", path_, errno);
  if (!S_ISREG(info.st_mode)) fail("open (not a regular file)", path_, EINVAL);
  device_ = info.st_dev;
  inode_ = info.st_ino;

  UsagePage page{};
  const auto good = [&] {
    return pread(file_.get(), static_cast<void*>(&page), sizeof page, 0) == sizeof page &&
           page.magic == kUsageMagic;
  };
  if (!good()) {
    const auto until = std::chrono::steady_clock::now() + kOpenPatience;
    const auto held = lock(Hold::kExclusive, [&] { return std::chrono::steady_clock::now() >= until; });
    if (!held) fail("lock", path_, ETIMEDOUT);
    if (!good()) {
      // Written rather than extended, so that the page has a block and no write through the mapping can fail.
      const UsagePage fresh{.magic = kUsageMagic, .used_nbytes = 0, .reserved = {}};
      const ssize_t written = pwrite(file_.get(), static_cast<const void*>(&fresh), sizeof fresh, 0);
      if (written != sizeof fresh) fail("write", path_, written < 0 ? errno : ENOSPC);
      invented_ = true;
    }
  }
  void* mapped = mmap(nullptr, sizeof(UsagePage), PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (mapped == MAP_FAILED) fail("map", path_, errno);
  page_.reset(static_cast<UsagePage*>(mapped));
}

std::optional<Usage::Lock> Usage::lock(Hold hold, const std::function<bool()>& give_up) const {
  const int how = (hold == Hold::kExclusive ? LOCK_EX : LOCK_SH) | LOCK_NB;
  auto pause = 50us;
  for (;;) {
    if (flock(file_.get(), how) == 0) return Lock(file_.get());
    if (errno != EWOULDBLOCK && errno != EINTR) fail("lock", path_, errno);
    if (give_up()) return std::nullopt;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, 1000us);
  }
}

bool Usage::current() const {
  struct stat info;
  return stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_;
}

bool Usage::reserve(std::uint64_t n, std::uint64_t capacity_nbytes) {
  std::uint64_t used = page_->used_nbytes.load();
  do {
    if (n > capacity_nbytes || used > capacity_nbytes - n) return false;
  } while (!page_->used_nbytes.compare_exchange_weak(used, used + n));
  return true;
}

void Usage::release(std::uint64_t n) {
  std::uint64_t used = page_->used_nbytes.load();
  while (!page_->used_nbytes.compare_exchange_weak(used, used - std::min(used, n))) {
  }
}

void Usage::set(std::uint64_t n) {
  page_->used_nbytes.store(n);
  invented_ = false;
}

std::uint64_t Usage::used_nbytes() const { return page_->used_nbytes.load(); }

std::uint64_t Usage::read(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  std::uint64_t used = 0;
  if (!file || pread(file.get(), &used, sizeof used, offsetof(UsagePage, used_nbytes)) != sizeof used)
    return 0;
  return used;
}

}  // namespace kvpool
