#include "file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "descriptor.h"
#include "evict.h"
#include "record_file.h"
#include "usage.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kOpenPatience = 10s;  // for a pass of another process, at open
constexpr auto kGiveBackPatience =
    50ms;                              // for the lock, when a failed put or a deletion takes back its bytes
constexpr int kMaxAttempts = 3;        // of a put whose directories are removed under its feet
constexpr auto kOpenCounting = 100ms;  // at open; of a larger store, puts count the rest
constexpr auto kPutCounting = 5ms;
constexpr auto kOpenEvicting = 1s;  // at open, where it is above its capacity; puts go on with it

struct Outcome {
  Status status;
  std::string error = {};
};

std::string words(int error) { return std::generic_category().message(error); }

bool no_space(int error) { return error == ENOSPC || error == EDQUOT; }

// The kernel's own time stamps move in steps of a timer tick (4 ms): too coarse to order records by.
void mark_used(int fd) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[2] = {now, now};
  // A file of another user takes the kernel's time only, and only from who may write to it.
  if (futimens(fd, times) != 0 && errno == EPERM) futimens(fd, nullptr);
}

void mark_used(const std::string& path) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[2] = {now, now};
  if (utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW) != 0 && errno == EPERM)
    utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

bool is_record(const struct stat& info) {
  return S_ISREG(info.st_mode) && info.st_size > static_cast<off_t>(kRecordHeaderNbytes);
}

}  // namespace

class FileLane : public Lane {
 public:
  FileLane(FileBackend& backend, unsigned index) : backend_(backend), pool_(backend.pool_), index_(index) {}

  void run(Source& source) override {
    while (std::optional<Item> item = source.next()) {
      Outcome outcome{Status::kFault};
      try {
        outcome = execute(*item);
      } catch (const std::filesystem::filesystem_error& error) {  // the lock: not supported, no memory for it
        outcome.error = error.what();
      } catch (const RefusedDirectory& error) {  // another one is in its place now
        outcome.error = error.what();
      }
      item->finish(outcome.status, std::move(outcome.error));
    }
  }

  // At open: the directory may have been left by the dead, and filled under a larger capacity.
  void settle() {
    if (const int error = refresh(); error != 0) {
      throw std::filesystem::filesystem_error("cannot use", backend_.root_ + "/usage",
                                              std::error_code(error, std::generic_category()));
    }
    const auto until = Clock::now() + kOpenPatience;
    const auto held = usage_->lock(Usage::Hold::kExclusive, [&] { return Clock::now() >= until; });
    if (!held) return;
    // What was counted before a reboot may not be what a disk has kept.
    if (usage_->read().boot != boot_id()) usage_->write({});
    count(backend_.root_, *usage_, Clock::now() + kOpenCounting);
    const auto enough = Clock::now() + kOpenEvicting;
    evict(0, backend_.capacity_nbytes_, [&] { return Clock::now() >= enough; });
  }

 private:
  // A file in tmp/ with the bytes reserved for it. Unless published, both go when it goes.
  class Temporary {
   public:
    Temporary(FileLane& lane, std::uint64_t nbytes) : lane_(lane), nbytes_(nbytes) {}
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;
    ~Temporary() {
      if (path_.empty()) {
        // Never created: the caller still holds the lock under which it reserved.
        lane_.give_back(kTemporaries, nbytes_);
      } else if (!published_) {
        lane_.remove(path_, kTemporaries, nbytes_);
      }
    }

    // Returns 0 or an errno. Under the lock: a pass must not see it before its writer holds its flock and
    // before it has its full size.
    int create() {
      path_ = lane_.temporary_path();
      const mode_t mode = lane_.pool_.file_mode;
      file_ = Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
      if (!file_) {
        path_.clear();
        return errno;
      }
      flock(file_.get(), LOCK_EX | LOCK_NB);
      if ((mode & S_IWGRP) != 0) fchmod(file_.get(), mode);  // whatever the umask
      return ftruncate(file_.get(), static_cast<off_t>(nbytes_)) == 0 ? 0 : errno;
    }
    int fd() const { return file_.get(); }
    const std::string& path() const { return path_; }
    void set_published() { published_ = true; }

   private:
    FileLane& lane_;
    std::uint64_t nbytes_;
    std::string path_;
    Descriptor file_;
    bool published_ = false;
  };

  Outcome execute(const Item& item) {
    if (const auto stopped = item.stopped()) return {*stopped};
    const std::string path = record_path(backend_.root_, item.key());
    switch (item.op()) {
      case Op::kPut:
        return put(item, path);
      case Op::kPutAbsent:
        return put_absent(item, path);
      case Op::kGet:
        return get(item, path);
      case Op::kContains:
        return contains(path);
      case Op::kTouch:
        return touch(path);
      case Op::kDelete:
        return remove_record(path, bucket_of(item.key()));
    }
    return {Status::kFault, "unknown operation"};
  }

  // ---- get

  Outcome get(const Item& item, const std::string& path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!file) {
      const int error = errno;
      if (error == ENOENT) return {Status::kMiss};
      if (error == ELOOP || error == ENXIO) return damaged(item, path, Damage::kLength);  // a link; a socket
      return unreadable(item, path, error);
    }
    struct stat info;
    if (fstat(file.get(), &info) != 0) return fault("get", path, errno);
    const std::span<std::byte> payload = item.buffer();
    if (!S_ISREG(info.st_mode)) return damaged(item, path, Damage::kLength);
    if (static_cast<std::uint64_t>(info.st_size) < kRecordHeaderNbytes)
      return damaged(item, path, Damage::kTruncated);

    RecordHeader header;
    std::size_t got = 0;  // payload bytes read
    {
      const std::span<std::byte> first = payload.first(std::min(payload.size(), kChunkNbytes));
      const iovec parts[2] = {{&header, sizeof header}, {first.data(), first.size()}};
      const ssize_t n = retry([&] { return preadv(file.get(), parts, 2, 0); });
      if (n < 0) return unreadable(item, path, errno);
      if (static_cast<std::size_t>(n) < sizeof header) return damaged(item, path, Damage::kTruncated);
      got = static_cast<std::size_t>(n) - sizeof header;
    }
    if (const Damage damage = check_header(header, item.key(), payload.size()); damage != Damage::kNone) {
      return damaged(item, path, damage);
    }
    if (static_cast<std::uint64_t>(info.st_size) != kRecordHeaderNbytes + payload.size()) {
      return damaged(item, path, Damage::kLength);
    }
    RecordChecksum checksum(header);
    checksum.update(payload.first(got));
    while (got < payload.size()) {
      if (const auto stopped = item.stopped()) return {*stopped};
      const std::span<std::byte> chunk = payload.subspan(got, std::min(payload.size() - got, kChunkNbytes));
      const ssize_t n = retry([&] {
        return pread(file.get(), chunk.data(), chunk.size(), static_cast<off_t>(kRecordHeaderNbytes + got));
      });
      if (n < 0) return unreadable(item, path, errno);
      if (n == 0) return damaged(item, path, Damage::kLength);
      checksum.update(chunk.first(static_cast<std::size_t>(n)));
      got += static_cast<std::size_t>(n);
    }
    if (checksum.digest() != header.checksum) return damaged(item, path, Damage::kChecksum);
    mark_used(file.get());
    return {Status::kOk};
  }

  // Counts and removes a record that cannot be what it claims to be. A good one that a writer renames into
  // its place just now goes with it: that is a miss more, never a wrong byte.
  Outcome damaged(const Item& item, const std::string& path, Damage damage) {
    remove(path, bucket_of(item.key()));
    return counted(damage);
  }

  // A record that contains() finds and nobody can read would fail every load of its prefix, and never be put again:
  // it goes as well. Where it cannot even be removed, the file system is at fault and not the record.
  Outcome unreadable(const Item& item, const std::string& path, int error) {
    if ((error == EACCES || error == EIO) && remove(path, bucket_of(item.key())) == 0)
      return counted(Damage::kTruncated);
    return fault("get", path, error);
  }

  Outcome counted(Damage damage) {
    backend_.damaged_[static_cast<std::size_t>(damage)].fetch_add(1, std::memory_order_relaxed);
    return {Status::kMiss};
  }

  // ---- contains, touch, delete

  Outcome contains(const std::string& path) const {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) {
      return errno == ENOENT ? Outcome{Status::kMiss} : fault("contains", path, errno);
    }
    return {is_record(info) ? Status::kOk : Status::kMiss};
  }

  Outcome touch(const std::string& path) const {
    const Outcome found = contains(path);
    if (found.status == Status::kOk) mark_used(path);
    return found;
  }

  Outcome remove_record(const std::string& path, unsigned bucket) {
    if (const int error = remove(path, bucket); error != 0) {
      return error == ENOENT ? Outcome{Status::kMiss} : fault("delete", path, error);
    }
    return {Status::kOk};
  }

  // Removes what lies in a record's place, whatever it is, but for a directory that is not empty. Returns 0 or
  // an errno.
  int remove(const std::string& path, unsigned bucket) {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) return errno;
    if (S_ISDIR(info.st_mode)) return rmdir(path.c_str()) == 0 ? 0 : errno;
    return remove(path, bucket, S_ISREG(info.st_mode) ? static_cast<std::uint64_t>(info.st_size) : 0);
  }

  // Unlinks a file and takes its bytes off a count. If the lock is not to be had soon, an eviction is under
  // way: then the bytes stay counted until somebody counts again, for too high is safe and too low is not.
  int remove(const std::string& path, unsigned counted_in, std::uint64_t nbytes) {
    find_usage();
    const auto until = Clock::now() + kGiveBackPatience;
    const auto held = usage_ ? usage_->lock(Usage::Hold::kShared, [&] { return Clock::now() >= until; })
                             : std::optional<Usage::Lock>();
    if (unlink(path.c_str()) != 0) return errno;
    if (held) give_back(counted_in, nbytes);
    return 0;
  }

  // Under the lock.
  void give_back(unsigned counted_in, std::uint64_t nbytes) {
    usage_->change({{counted_in, -static_cast<std::int64_t>(nbytes)}});
  }

  // ---- put

  // Two writers that both find nothing both put, and the record is that of the last.
  Outcome put_absent(const Item& item, const std::string& path) {
    const Outcome found = touch(path);
    if (found.status == Status::kOk) return {Status::kPresent};
    return found.status == Status::kMiss ? put(item, path) : found;
  }

  Outcome put(const Item& item, const std::string& path) {
    const std::uint64_t nbytes = kRecordHeaderNbytes + item.buffer().size();
    if (nbytes > backend_.capacity_nbytes_) return {Status::kNoRoom};
    bool made_space = false;
    int error = 0;
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
      Outcome outcome{Status::kFault};
      error = put_once(item, path, nbytes, outcome);
      if (error == 0) return outcome;
      if (error == ENOENT) continue;
      if (!no_space(error)) break;
      // The file system is full although we are below our capacity: somebody else fills it, or the capacity
      // is wrong.
      if (made_space) return {Status::kNoRoom};
      made_space = true;
      if (const auto stopped = make_space(item, nbytes)) return {*stopped};
    }
    if (no_space(error)) return {Status::kNoRoom};
    return fault("put", path, error);
  }

  // Returns 0 when `outcome` is decided, else an errno. ENOENT: a directory was removed; try again.
  int put_once(const Item& item, const std::string& path, std::uint64_t nbytes, Outcome& outcome) {
    const GiveUp give_up = [&item] { return item.stopped().has_value(); };
    if (const int error = refresh(); error != 0) return error;
    const std::uint64_t capacity_nbytes = backend_.capacity_nbytes_;

    std::optional<Temporary> temporary;
    {
      auto held = usage_->lock(Usage::Hold::kShared, give_up);
      if (held && !usage_->reserve(nbytes, capacity_nbytes, Usage::Known::kAll)) {
        held.reset();
        held = usage_->lock(Usage::Hold::kExclusive, give_up);
        if (held) count(backend_.root_, *usage_, Clock::now() + kPutCounting);
        if (held && !usage_->reserve(nbytes, capacity_nbytes, Usage::Known::kEstimated)) {
          evict(nbytes, capacity_nbytes, give_up);
          if (!usage_->reserve(nbytes, capacity_nbytes, Usage::Known::kEstimated)) {
            outcome = {item.stopped().value_or(Status::kNoRoom)};
            return 0;
          }
        }
      }
      if (!held) {
        outcome = {item.stopped().value_or(Status::kTimedOut)};
        return 0;
      }
      temporary.emplace(*this, nbytes);
      if (const int error = temporary->create(); error != 0) {
        if (temporary->fd() >= 0) held.reset();  // it takes the lock again to give its bytes back
        temporary.reset();
        return error == ENOENT ? make_again(backend_.root_ + "/tmp") : error;
      }
    }

    if (const auto decided = write(item, temporary->fd(), outcome); decided >= 0) return decided;
    mark_used(temporary->fd());

    const auto held = usage_->lock(Usage::Hold::kShared, give_up);
    if (!held) {
      outcome = {item.stopped().value_or(Status::kTimedOut)};
      return 0;
    }
    // First counted in its bucket, then there: who is killed in between leaves a count that is too high.
    const unsigned bucket = bucket_of(item.key());
    const auto counted = static_cast<std::int64_t>(nbytes);
    std::uint64_t replaced_nbytes = 0;
    usage_->change({{kTemporaries, -counted}, {bucket, counted}});
    const int error = publish(*temporary, path, replaced_nbytes);
    if (error != 0) {
      usage_->change({{bucket, -counted}, {kTemporaries, counted}});
    } else {
      if (replaced_nbytes != 0) give_back(bucket, replaced_nbytes);
      outcome = {Status::kOk};
    }
    return error;
  }

  // The payload in chunks, each hashed just before it is written, and the header last. Returns -1 when all is
  // written, else what put_once() returns.
  int write(const Item& item, int fd, Outcome& outcome) const {
    const std::span<const std::byte> payload = item.buffer();
    RecordHeader header = make_header(item.key(), payload.size());
    RecordChecksum checksum(header);
    for (std::size_t begin = 0; begin < payload.size(); begin += kChunkNbytes) {
      if (const auto stopped = item.stopped()) {
        outcome = {*stopped};
        return 0;
      }
      const auto chunk = payload.subspan(begin, std::min(payload.size() - begin, kChunkNbytes));
      checksum.update(chunk);
      if (const int error = write_all(fd, chunk, kRecordHeaderNbytes + begin); error != 0) return error;
    }
    header.checksum = checksum.digest();
    const int error = write_all(fd, std::as_bytes(std::span(&header, 1)), 0);
    return error == 0 ? -1 : error;
  }

  static int write_all(int fd, std::span<const std::byte> data, std::size_t offset) {
    while (!data.empty()) {
      const ssize_t n =
          retry([&] { return pwrite(fd, data.data(), data.size(), static_cast<off_t>(offset)); });
      if (n < 0) return errno;
      if (n == 0) return EIO;
      data = data.subspan(static_cast<std::size_t>(n));
      offset += static_cast<std::size_t>(n);
    }
    return 0;
  }

  // Under the lock. Two writers of one key both end here: exchanging, rather than replacing, tells each
  // exactly what it took away, so that the counts stay true.
  int publish(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes) {
    const char* from = temporary.path().c_str();
    const char* to = path.c_str();
    bool made_folder = false;
    for (;;) {
      if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) break;
      if (errno == EEXIST) {
        if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0) {
          struct stat old;
          if (lstat(from, &old) != 0) break;
          if (S_ISDIR(old.st_mode)) {
            if (rmdir(from) == 0) break;
            renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE);
            return EISDIR;
          }
          if (unlink(from) == 0 && S_ISREG(old.st_mode))
            replaced_nbytes = static_cast<std::uint64_t>(old.st_size);
          break;
        }
        if (errno == ENOENT) continue;  // deleted in between
      }
      if (errno == EINVAL || errno == ENOSYS) return publish_plainly(temporary, path, replaced_nbytes);
      if (errno != ENOENT || made_folder) return errno;
      made_folder = true;
      if (const int error = make_bucket(path); error != 0) return error;
    }
    temporary.set_published();
    return 0;
  }

  // For file systems that cannot exchange: two writers of one key may leave its bytes counted twice until the
  // bucket is counted again.
  int publish_plainly(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes) {
    struct stat old;
    const bool there = lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode);
    if (rename(temporary.path().c_str(), path.c_str()) != 0) {
      if (errno != ENOENT) return errno;
      if (const int error = make_bucket(path); error != 0) return error;
      if (rename(temporary.path().c_str(), path.c_str()) != 0) return errno;
    }
    if (there) replaced_nbytes = static_cast<std::uint64_t>(old.st_size);
    temporary.set_published();
    return 0;
  }

  // The bucket of a record's path; ENOENT when all of blocks/ is gone.
  int make_bucket(const std::string& path) const {
    const int error = make_folder(pool_, path.substr(0, path.rfind('/')));
    return error == ENOENT ? make_again(backend_.root_ + "/blocks") : error;
  }

  // ---- room

  // Under the exclusive lock.
  void evict(std::uint64_t n, std::uint64_t capacity_nbytes, const GiveUp& give_up) {
    const Evicted evicted = make_room(backend_.root_, *usage_, n, capacity_nbytes, give_up);
    if (evicted.records == 0) return;
    backend_.passes_.fetch_add(1, std::memory_order_relaxed);
    backend_.evicted_.fetch_add(evicted.records, std::memory_order_relaxed);
    backend_.evicted_nbytes_.fetch_add(evicted.nbytes, std::memory_order_relaxed);
  }

  // For a put that found the file system full. Returns a status when the item is to be given up.
  std::optional<Status> make_space(const Item& item, std::uint64_t nbytes) {
    const GiveUp give_up = [&item] { return item.stopped().has_value(); };
    const auto held = usage_->lock(Usage::Hold::kExclusive, give_up);
    if (held) {
      count(backend_.root_, *usage_, Clock::now() + kPutCounting);
      // As if it were full with what it has.
      evict(nbytes, usage_->read().sum().nbytes, give_up);
    }
    return item.stopped();
  }

  // ---- the directory

  // Opens the counts; finds out that they, or the directory, were removed (and perhaps made again by another
  // process), and starts anew. Throws RefusedDirectory.
  int refresh() {
    if (usage_ && usage_->current()) return 0;
    try {
      pool_ = make_pool(backend_.root_, pool_);
      usage_.emplace(backend_.root_ + "/usage", pool_.file_mode);
    } catch (const std::filesystem::filesystem_error& error) {
      return error.code().value();
    }
    return 0;
  }

  // For who takes something away: makes nothing.
  void find_usage() {
    if (usage_) return;
    try {
      usage_.emplace(backend_.root_ + "/usage", std::nullopt);
    } catch (
        const std::filesystem::filesystem_error&) {  // none, or not ours to write: what goes is not counted
    }
  }

  // Returns ENOENT (try again) or what stands in the way.
  int make_again(const std::string& path) const {
    const int error = make_folder(pool_, path);
    return error == 0 ? ENOENT : error;
  }

  // ---- small things

  std::string temporary_path() {
    return backend_.root_ + "/tmp/" + std::to_string(getpid()) + "." + std::to_string(index_) + "." +
           std::to_string(++sequence_) + "." + std::to_string(random_());
  }

  static Outcome fault(const char* what, const std::string& path, int error) {
    return {Status::kFault, std::string(what) + " " + path + ": " + words(error)};
  }

  template <typename Call>
  static ssize_t retry(Call call) {
    for (;;) {
      const ssize_t n = call();
      if (n >= 0 || errno != EINTR) return n;
    }
  }

  FileBackend& backend_;
  PoolDirectory pool_;
  const unsigned index_;
  std::optional<Usage> usage_;  // opened when first needed
  std::uint64_t sequence_ = 0;
  std::random_device random_;
};

FileBackend::FileBackend(const std::string& root, std::uint64_t capacity_nbytes, Open how)
    : root_(std::filesystem::absolute(root).lexically_normal()), capacity_nbytes_(capacity_nbytes) {
  while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
  pool_ = how == Open::kMake ? make_pool(root_) : find_pool(root_);
  if (how == Open::kMake) FileLane(*this, 0).settle();
}

std::unique_ptr<Lane> FileBackend::make_lane(unsigned index) {
  return std::make_unique<FileLane>(*this, index);
}

void FileBackend::append_counters(Counters& counters) const {
  std::uint64_t damaged = 0;
  for (std::size_t i = 1; i < kDamageCount; ++i) damaged += damaged_[i].load(std::memory_order_relaxed);
  counters.emplace_back("damaged", damaged);
  for (std::size_t i = 1; i < kDamageCount; ++i) {
    counters.emplace_back("damaged_" + std::string(damage_name(static_cast<Damage>(i))),
                          damaged_[i].load(std::memory_order_relaxed));
  }
  counters.emplace_back("evicted", evicted_.load(std::memory_order_relaxed));
  counters.emplace_back("evicted_nbytes", evicted_nbytes_.load(std::memory_order_relaxed));
  counters.emplace_back("eviction_passes", passes_.load(std::memory_order_relaxed));
  counters.emplace_back("stored_nbytes", Usage::used_nbytes(root_ + "/usage"));
}

}  // namespace kvpool
