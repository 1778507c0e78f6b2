// The file backend: loads, lookups, deletions, and the shared directory. Puts: file_put.cpp.
#include "store/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <utility>

#include "store/descriptor.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kOpenPatience = 10s;       // for another process's pass, at open
constexpr auto kGiveBackPatience = 50ms;  // for the lock, to subtract the bytes of a failed put or a deletion
constexpr auto kOpenCounting = 100ms;     // at open; puts count the rest of a larger store
constexpr int kMostReplaced = 3;          // attempts to read a record that is replaced meanwhile
constexpr auto kOpenEvicting = 1s;        // at open, above capacity; puts continue it

std::string absolute_root(const std::string& root) {
  std::string path = std::filesystem::absolute(root).lexically_normal();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// The kernel's time stamps move by timer ticks (4 ms): too coarse to order records.
template <typename Set>
void set_times(Clock::time_point used_at, Set set) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const auto at = std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec) -
                  std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - used_at);
  const auto whole = std::chrono::floor<std::chrono::seconds>(at);
  const timespec time{static_cast<time_t>(whole.count()), static_cast<long>((at - whole).count())};
  const timespec times[2] = {time, time};
  // Another user's file accepts only the kernel's time, and only from its writers.
  if (set(times) != 0 && errno == EPERM) set(nullptr);
}

}  // namespace

FileBackend::FileBackend(const std::string& root, std::optional<std::uint64_t> capacity_nbytes,
                         Patience lock_patience)
    : root_(absolute_root(root)),
      capacity_(root_, capacity_nbytes.value_or(kUnlimited)),
      lock_patience_(lock_patience),
      pool_(capacity_nbytes ? make_pool(root_) : find_pool(root_)),
      direct_(root_) {
  if (capacity_nbytes) FileIoThread(*this, 0).settle();
}

std::unique_ptr<IoThread> FileBackend::make_io_thread(unsigned index) {
  return std::make_unique<FileIoThread>(*this, index);
}

void FileBackend::append_counters(Counters& counters) const {
  damaged_.append(counters);
  counters.emplace_back("evicted", evicted_.load(std::memory_order_relaxed));
  counters.emplace_back("evicted_nbytes", evicted_nbytes_.load(std::memory_order_relaxed));
  counters.emplace_back("eviction_passes", passes_.load(std::memory_order_relaxed));
  counters.emplace_back("stored_nbytes", Usage::used_nbytes(root_ + "/usage"));
  counters.emplace_back("capacity_nbytes", read_capacity(root_).value_or(0));  // 0: none stands in the pool
}

void FileIoThread::mark_used(int fd, Clock::time_point used_at) {
  set_times(used_at, [&](const timespec* times) { return futimens(fd, times); });
}

void FileIoThread::mark_used(const std::string& path, Clock::time_point used_at) {
  set_times(used_at, [&](const timespec* times) {
    return utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW);
  });
}

void FileIoThread::run(Source& source) {
  while (std::optional<Item> item = source.next()) {
    Outcome outcome{Status::kFault};
    try {
      outcome = execute(*item);
    } catch (const std::filesystem::filesystem_error& error) {  // the lock: not supported, no memory for it
      outcome.error = error.what();
    } catch (const RefusedDirectory& error) {  // another directory took its place
      outcome.error = error.what();
    }
    item->finish(outcome.status, std::move(outcome.error), outcome.blame);
  }
}

// At open: dead writers' files may remain, and the pool may have no capacity yet, or a smaller one.
void FileIoThread::settle() {
  if (const int error = refresh(); error != 0) fail("cannot use", backend_.root_ + "/usage", error);
  const auto until = Clock::now() + kOpenPatience;
  const auto held = lock(Usage::Hold::kExclusive, [&] { return Clock::now() >= until; });
  if (!held) return;
  // Counts from before a reboot may not match the disk.
  if (usage_->read().boot != boot_id()) usage_->write({});
  count(backend_.root_, *usage_, free_, Clock::now() + kOpenCounting);
  const auto enough = Clock::now() + kOpenEvicting;
  const std::uint64_t capacity_nbytes =
      backend_.capacity_.settle(usage_->read().sum().nbytes, pool_.file_mode);
  trim(*usage_, free_, 0, capacity_nbytes);
  evict(0, capacity_nbytes, [&] { return Clock::now() >= enough; });
  trim(*usage_, free_, 0, capacity_nbytes);
}

FileIoThread::Outcome FileIoThread::execute(const Item& item) {
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
      return contains(item, path);
    case Op::kTouch:
      return touch(item, path);
    case Op::kExpire:
      return expire(item, path);
    case Op::kDelete:
      return remove_record(item, path);
  }
  return {Status::kFault, "unknown operation"};
}

FileIoThread::Outcome FileIoThread::get(const Item& item, const std::string& path) {
  for (int attempt = 0; attempt < kMostReplaced; ++attempt) {
    Outcome outcome{Status::kFault};
    const int error = get_once(item, path, outcome);
    if (error == 0) return outcome;
    if (error != EAGAIN) return unreadable(item, path, error);
  }
  return {Status::kMiss};
}

int FileIoThread::get_once(const Item& item, const std::string& path, Outcome& outcome) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    const int error = errno;
    if (error == ENOENT) {
      outcome = {Status::kMiss};
    } else if (error == ELOOP || error == ENXIO) {  // a link; a socket
      outcome = damaged(item, path, Damage::kLength);
    } else {
      return error;
    }
    return 0;
  }
  struct stat info;
  if (fstat(file.get(), &info) != 0) return errno;
  const std::span<std::byte> payload = item.buffer();
  const auto refuse = [&](Damage damage) {
    // Evicted or replaced since it was opened, its file may be another record's, or become it.
    if (!is_as_opened(path, info)) return EAGAIN;
    outcome = damaged(item, path, damage);
    return 0;
  };
  if (!S_ISREG(info.st_mode)) return refuse(Damage::kLength);
  const auto held = payload_nbytes(info);
  if (!held) return refuse(Damage::kTruncated);
  if (*held != payload.size()) return refuse(Damage::kLength);
  backend_.direct_.apply(file.get());

  RecordHeader header;
  RecordChecksum checksum;
  const auto give_up = [&, moves = false]() mutable {
    if (moves) item.moved(Clock::now());
    moves = true;
    return item.stopped().has_value();
  };
  switch (record_file_.read(file.get(), payload, header, checksum, give_up)) {
    case RecordFile::End::kGivenUp:
      outcome = {item.stopped().value_or(Status::kTimedOut)};
      return 0;
    case RecordFile::End::kError: {
      const int error = errno;
      return record_file_.asks_less(file.get(), error) ? EAGAIN : error;
    }
    case RecordFile::End::kCut:
      return refuse(Damage::kLength);
    case RecordFile::End::kWhole:
      break;
  }
  if (const Damage damage = verify_record(item.key(), header, payload.size(), checksum);
      damage != Damage::kNone) {
    return refuse(damage);
  }
  mark_used(file.get(), item.used_at());
  item.tell({payload.size(), Seal{header.writer, header.checksum}});
  outcome = {Status::kOk};
  return 0;
}

// Counts and removes an invalid record. A good one renamed into its place meanwhile is also lost: a further
// miss, never a wrong byte.
FileIoThread::Outcome FileIoThread::damaged(const Item& item, const std::string& path, Damage damage) {
  remove(path, bucket_of(item.key()));
  return counted(damage);
}

// Removes a present but unreadable record: it would fail every load of its prefix and never be replaced. If
// even that fails, the file system is at fault, not the record.
FileIoThread::Outcome FileIoThread::unreadable(const Item& item, const std::string& path, int error) {
  if ((error == EACCES || error == EIO) && remove(path, bucket_of(item.key())) == 0)
    return counted(Damage::kTruncated);
  return fault("get", path, error);
}

FileIoThread::Outcome FileIoThread::counted(Damage damage) {
  backend_.damaged_.add(damage);
  return {Status::kMiss};
}

FileIoThread::Outcome FileIoThread::contains(const Item& item, const std::string& path) const {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? Outcome{Status::kMiss} : fault("contains", path, errno);
  }
  const auto held = payload_nbytes(info);
  if (!S_ISREG(info.st_mode) || !held) return {Status::kMiss};
  item.tell({static_cast<std::size_t>(*held), {}});
  return {Status::kOk};
}

FileIoThread::Outcome FileIoThread::touch(const Item& item, const std::string& path) const {
  Outcome found = contains(item, path);
  if (found.status == Status::kOk) mark_used(path, item.used_at());
  return found;
}

// As if it had never been used.
FileIoThread::Outcome FileIoThread::expire(const Item& item, const std::string& path) const {
  Outcome found = contains(item, path);
  constexpr timespec kNever[2] = {{0, UTIME_OMIT}, {0, 0}};
  if (found.status == Status::kOk) utimensat(AT_FDCWD, path.c_str(), kNever, AT_SYMLINK_NOFOLLOW);
  return found;
}

FileIoThread::Outcome FileIoThread::remove_record(const Item& item, const std::string& path) {
  const int error = remove(path, bucket_of(item.key()));
  remove_free(item);
  if (error == 0) return {Status::kOk};
  return error == ENOENT ? Outcome{Status::kMiss} : fault("delete", path, error);
}

// Removes anything at a record's path, except a non-empty directory. Returns 0 or an errno.
int FileIoThread::remove(const std::string& path, unsigned bucket) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return errno;
  if (S_ISDIR(info.st_mode)) return rmdir(path.c_str()) == 0 ? 0 : errno;
  return remove(path, bucket, S_ISREG(info.st_mode) ? file_nbytes(info) : 0);
}

// Unlinks a file and subtracts its bytes. If an eviction holds the lock, the bytes stay counted until the
// next count: too high is safe, too low is not.
int FileIoThread::remove(const std::string& path, unsigned counted_in, std::uint64_t nbytes) {
  find_usage();
  const auto until = Clock::now() + kGiveBackPatience;
  const auto held = usage_ ? usage_->lock(Usage::Hold::kShared, [&] { return Clock::now() >= until; })
                           : std::optional<Usage::Lock>();
  if (unlink(path.c_str()) != 0) return errno;
  if (held) give_back(counted_in, nbytes);
  return 0;
}

// What was evicted is to go with what is deleted. Waits for living peers.
void FileIoThread::remove_free(const Item& item) {
  find_usage();
  if (!usage_ || usage_->read().nbytes(kFree) == std::uint64_t{0}) return;
  if (const auto held = usage_->lock(Usage::Hold::kExclusive, [&] { return item.stopped().has_value(); }))
    usage_->set(kFree, free_.remove(kUnlimited));
}

// Under the lock.
void FileIoThread::give_back(unsigned counted_in, std::uint64_t nbytes) {
  usage_->change({{counted_in, -static_cast<std::int64_t>(nbytes)}});
}

// Under the exclusive lock.
void FileIoThread::evict(std::uint64_t n, std::uint64_t capacity_nbytes, const GiveUp& give_up) {
  make_folder(pool_, backend_.root_ + "/free");  // may have been removed
  const Evicted evicted = make_room(backend_.root_, *usage_, free_, n, capacity_nbytes, give_up);
  if (evicted.records == 0) return;
  backend_.passes_.fetch_add(1, std::memory_order_relaxed);
  backend_.evicted_.fetch_add(evicted.records, std::memory_order_relaxed);
  backend_.evicted_nbytes_.fetch_add(evicted.nbytes, std::memory_order_relaxed);
}

// Opens the counts; if they or the directory were removed (and perhaps recreated by another process), starts
// anew. Throws RefusedDirectory.
int FileIoThread::refresh() {
  if (usage_ && usage_->current()) return 0;
  try {
    pool_ = make_pool(backend_.root_, pool_);
    usage_.emplace(backend_.root_ + "/usage", pool_.file_mode);
  } catch (const std::filesystem::filesystem_error& error) {
    return error.code().value();
  }
  return 0;
}

// The lock of the present counts, after refresh(); nothing when given up. New counts take the place of those
// whose lock a stopped process holds: no wait outlives lock_patience_ but for living peers.
std::optional<Usage::Lock> FileIoThread::lock(Usage::Hold hold, const GiveUp& give_up) {
  for (;;) {
    {
      auto held = usage_->lock(hold, give_up, backend_.lock_patience_);
      if (held ? usage_->current() : !usage_->stopped() && give_up()) return held;
      if (usage_->stopped() && usage_->current()) {
        const std::string fresh = temporary_path();
        static_cast<void>(Usage(fresh, pool_.file_mode));
        // Peers may do the same: the last file stays, and locks of the others are found to be of no use.
        if (rename(fresh.c_str(), (backend_.root_ + "/usage").c_str()) != 0 && errno != ENOENT)
          fail("cannot replace", backend_.root_ + "/usage", errno);
      }
    }
    if (const int error = refresh(); error != 0) fail("cannot use", backend_.root_ + "/usage", error);
  }
}

// For removals: creates nothing.
void FileIoThread::find_usage() {
  if (usage_ && usage_->current()) return;
  try {
    usage_ = Usage(backend_.root_ + "/usage", std::nullopt);
  } catch (const std::filesystem::filesystem_error&) {  // absent or read-only: removals stay uncounted
  }
}

// Returns ENOENT (try again) or the obstacle's errno.
int FileIoThread::make_again(const std::string& path) const {
  const int error = make_folder(pool_, path);
  return error == 0 ? ENOENT : error;
}

std::string FileIoThread::temporary_path() {
  return backend_.root_ + "/tmp/" + std::to_string(getpid()) + "." + std::to_string(index_) + "." +
         std::to_string(++sequence_) + "." + std::to_string(random_());
}

FileIoThread::Outcome FileIoThread::fault(const char* what, const std::string& path, int error) {
  const bool is_of_key = error == EISDIR || error == EFBIG || error == ENAMETOOLONG;
  return {is_of_key ? Status::kRefused : Status::kFault,
          std::string(what) + " " + path + ": " + words_of(error)};
}

}  // namespace kvpool
