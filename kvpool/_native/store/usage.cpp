// The file of byte counts: checks, lock, changes.
#include "store/usage.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <limits>
#include <thread>

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

static_assert(std::endian::native == std::endian::little, "the file is written as it lies in memory");

constexpr auto kCountsPatience = 250ms;  // peers hold their lock for a microsecond, unless stopped meanwhile
constexpr int kSpins = 100;
constexpr std::uint64_t kReservedPart = 20;  // of the file system: every twentieth byte
constexpr std::uint64_t kMinReserve_nbytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kMaxReserve_nbytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kMaxCount = (std::uint64_t{1} << 48) - 1;

// Never 0, so that zeros are invalid.
std::uint64_t check_of(unsigned index, std::uint64_t nbytes) {
  std::uint64_t mixed = (nbytes ^ ((index + 1) * 0x9e37'79b9'7f4a'7c15U)) * 0xff51'afd7'ed55'8ccdU;
  mixed ^= mixed >> 32;
  return (mixed & 0xffff) | 1;
}

std::uint64_t packed(unsigned index, std::uint64_t nbytes) {
  nbytes = std::min(nbytes, kMaxCount);
  return nbytes << 16 | check_of(index, nbytes);
}

std::optional<std::uint64_t> unpacked(unsigned index, std::uint64_t word) {
  const std::uint64_t nbytes = word >> 16;
  if ((word & 0xffff) != check_of(index, nbytes)) return std::nullopt;
  return nbytes;
}

off_t place_of(unsigned index) {
  return static_cast<off_t>(offsetof(UsagePage, counts) + index * sizeof(std::uint64_t));
}

constexpr off_t kCursorPlace = offsetof(UsagePage, cursor);

UsagePage read_page(int fd) {
  UsagePage page;  // missing parts of the file stay zero: unknown
  [[maybe_unused]] const ssize_t ignored = pread(fd, static_cast<void*>(&page), sizeof page, 0);
  return page;
}

// F_WRLCK or F_UNLCK: of the counts' first byte.
bool set_lock(int fd, short type) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_len = 1;
  return fcntl(fd, F_OFD_SETLK, &range) == 0;
}

}  // namespace

FileSystem file_system(int fd) {
  struct statvfs info;
  if (fstatvfs(fd, &info) != 0 || info.f_blocks == 0) return {};
  const std::uint64_t total = info.f_blocks * info.f_frsize;
  return {total, info.f_bavail * info.f_frsize,
          std::clamp(total / kReservedPart, kMinReserve_nbytes, kMaxReserve_nbytes)};
}

std::optional<std::uint64_t> UsagePage::nbytes(unsigned index) const {
  return unpacked(index, counts[index]);
}

void UsagePage::set(unsigned index, std::uint64_t nbytes) { counts[index] = packed(index, nbytes); }

UsagePage::Sum UsagePage::sum() const {
  std::uint64_t held = 0;
  unsigned known = 0;
  unsigned filled = 0;
  for (unsigned i = 0; i < kBuckets; ++i) {
    if (const auto count = nbytes(i)) {
      held += *count;
      ++known;
      filled += *count != 0 ? 1 : 0;
    }
  }
  if (filled != 0) held += held / filled * (kBuckets - known);
  unsigned unknown = kBuckets - known;
  for (const unsigned index : {kTemporaries, kFree}) {
    const auto count = nbytes(index);
    held += count.value_or(0);
    unknown += count ? 0 : 1;
  }
  return {held, unknown};
}

Usage::Lock::~Lock() {
  if (fd_ >= 0) flock(fd_, LOCK_UN);
}

Usage::Usage(std::string path, std::optional<mode_t> mode) : path_(std::move(path)) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (mode ? O_CREAT : 0);
  file_ = Descriptor(open(path_.c_str(), flags, mode.value_or(0)));
  if (!file_) fail("open", path_, errno);
  struct stat info;
  if (fstat(file_.get(), &info) != 0) fail("stat", path_, errno);
  if (!S_ISREG(info.st_mode)) fail("open (not a regular file)", path_, EINVAL);
  if (mode && info.st_uid == geteuid() && (info.st_mode & 0777) != *mode) fchmod(file_.get(), *mode);
  device_ = info.st_dev;
  inode_ = info.st_ino;
}

std::optional<Usage::Lock> Usage::lock(Hold hold, const GiveUp& give_up, Patience patience) const {
  const int how = (hold == Hold::kExclusive ? LOCK_EX : LOCK_SH) | LOCK_NB;
  auto pause = 50us;
  auto heard = SteadyClock::now() - waited_;  // the last turn of others
  for (std::uint64_t seen = cursor();;) {
    if (flock(file_.get(), how) == 0) {
      waited_ = {};
      stopped_ = false;
      if (hold == Hold::kExclusive) {
        const std::uint64_t turn = cursor() + kBuckets;
        [[maybe_unused]] const ssize_t ignored = pwrite(file_.get(), &turn, sizeof turn, kCursorPlace);
      }
      return Lock(file_.get());
    }
    if (errno != EWOULDBLOCK && errno != EINTR) fail("lock", path_, errno);
    const auto now = SteadyClock::now();
    if (const std::uint64_t turn = cursor(); turn != seen) {
      seen = turn;
      heard = now;
    }
    waited_ = now - heard;
    stopped_ = waited_ >= patience;
    if (stopped_ || give_up()) return std::nullopt;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, 1000us);
  }
}

bool Usage::current() const {
  struct stat info;
  return stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_;
}

std::uint64_t Usage::cursor() const {
  std::uint64_t cursor = 0;
  [[maybe_unused]] const ssize_t ignored = pread(file_.get(), &cursor, sizeof cursor, kCursorPlace);
  return cursor;
}

bool Usage::lock_counts() const {
  const auto until = SteadyClock::now() + kCountsPatience;
  for (int spins = 0;; ++spins) {
    if (set_lock(file_.get(), F_WRLCK)) return true;
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) return false;
    if (spins < kSpins) {
      sched_yield();
    } else if (SteadyClock::now() < until) {
      std::this_thread::sleep_for(50us);
    } else {
      return false;
    }
  }
}

void Usage::unlock_counts() const { set_lock(file_.get(), F_UNLCK); }

void Usage::store(unsigned index, std::uint64_t word) const {
  [[maybe_unused]] const ssize_t ignored =  // a failed write leaves a count unknown or too high
      pwrite(file_.get(), &word, sizeof word, place_of(index));
}

std::uint64_t Usage::excess_nbytes(const UsagePage& page, std::uint64_t n,
                                   std::uint64_t capacity_nbytes) const {
  const auto above = [](std::uint64_t wanted, std::uint64_t room) { return wanted - std::min(wanted, room); };
  const std::uint64_t excess = above(page.sum().nbytes + n, capacity_nbytes);
  const FileSystem system = file_system(file_.get());
  if (system.reserve_nbytes == 0) return excess;
  // Temporaries count as if nothing of them were written yet: peers may write all of them next.
  const std::uint64_t coming = page.nbytes(kTemporaries).value_or(0) + n;
  return std::max(excess, above(coming + system.reserve_nbytes, system.free_nbytes));
}

bool Usage::may_reuse(std::uint64_t n, std::uint64_t capacity_nbytes) const {
  std::uint64_t word = 0;
  if (pread(file_.get(), &word, sizeof word, place_of(kFree)) != sizeof word) return false;
  if (unpacked(kFree, word).value_or(0) < n) return false;
  if (!lock_counts()) return false;
  const bool fits = excess_nbytes(read(), 0, capacity_nbytes) == 0;
  unlock_counts();
  return fits;
}

bool Usage::reserve(std::uint64_t n, std::uint64_t capacity_nbytes, Known known) {
  if (n > capacity_nbytes || !lock_counts()) return false;
  const UsagePage page = read();
  const auto temporaries = page.nbytes(kTemporaries);
  const bool reserved =
      (known == Known::kEstimated || page.sum().unknown == 0) && excess_nbytes(page, n, capacity_nbytes) == 0;
  // An unknown count stays so: the next count includes the file.
  if (reserved && temporaries) store(kTemporaries, packed(kTemporaries, *temporaries + n));
  unlock_counts();
  return reserved;
}

void Usage::change(std::initializer_list<Change> changes) {
  const bool locked = lock_counts();
  for (const auto& [index, nbytes] : changes) {
    std::uint64_t word = 0;
    if (locked && pread(file_.get(), &word, sizeof word, place_of(index)) == sizeof word) {
      const auto count = unpacked(index, word);
      if (!count) continue;
      const auto size = static_cast<std::uint64_t>(nbytes < 0 ? -nbytes : nbytes);
      word = packed(index, nbytes < 0 ? *count - std::min(*count, size) : *count + size);
    }
    store(index, word);  // unknown, if the change failed
  }
  if (locked) unlock_counts();
}

UsagePage Usage::read() const { return read_page(file_.get()); }

void Usage::write(const UsagePage& page) {
  [[maybe_unused]] const ssize_t ignored =  // as store()
      pwrite(file_.get(), static_cast<const void*>(&page), sizeof page, 0);
}

void Usage::set(unsigned index, std::uint64_t nbytes) { store(index, packed(index, nbytes)); }

std::uint64_t Usage::used_nbytes(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  return file ? read_page(file.get()).sum().nbytes : 0;
}

std::array<char, 16> boot_id() {
  std::array<char, 16> id{};  // 16 of its digits suffice
  const Descriptor file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (file && pread(file.get(), id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) id = {};
  return id;
}

}  // namespace kvpool
