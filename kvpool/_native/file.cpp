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
#include "usage.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr mode_t kDirectoryMode = 0770;
constexpr mode_t kFileMode = 0660;
constexpr auto kOpenPatience = 10s;  // for a pass of another process, at open
constexpr auto kGiveBackPatience =
    50ms;                        // for the lock, when a failed put or a deletion takes back its bytes
constexpr int kMaxAttempts = 3;  // of a put whose directories are removed under its feet

struct Outcome {
  Status status;
  std::string error = {};
};

std::string words(int error) { return std::generic_category().message(error); }

bool no_space(int error) { return error == ENOSPC || error == EDQUOT; }

// Returns 0 or an errno.
int make_directories(const std::string& path) {
  if (mkdir(path.c_str(), kDirectoryMode) == 0 || errno == EEXIST) return 0;
  if (errno != ENOENT) return errno;
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0) return ENOENT;
  if (const int error = make_directories(path.substr(0, slash)); error != 0) return error;
  return mkdir(path.c_str(), kDirectoryMode) == 0 || errno == EEXIST ? 0 : errno;
}

// Tenants and hashes are checked by parse_key: no '/', no '.', nothing to escape with.
std::string record_path(const std::string& root, const Key& key) {
  const std::string_view hash = key.hash();
  std::string path;
  path.reserve(root.size() + key.text.size() + 16);
  path.append(root).append("/blocks/").append(key.tenant()).append("/").append(key.name_space());
  path.append("/").append(hash.substr(0, 3)).append("/").append(hash).append(".");
  path.append(std::to_string(key.group)).append(".").append(std::to_string(key.rank));
  return path;
}

// The kernel's own time stamps move in steps of a timer tick (4 ms): too coarse to order records by.
void mark_used(int fd) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[2] = {now, now};
  // Fails for a file of another user: then its age is that of its last write.
  [[maybe_unused]] const int ignored = futimens(fd, times);
}

}  // namespace

class FileLane : public Lane {
 public:
  FileLane(FileBackend& backend, unsigned index)
      : backend_(backend), index_(index), usage_(backend.root_ + "/usage") {}

  void run(Source& source) override {
    while (std::optional<Item> item = source.next()) {
      Outcome outcome{Status::kFault};
      try {
        outcome = execute(*item);
      } catch (const std::filesystem::filesystem_error& error) {  // the lock: not supported, no memory for it
        outcome.error = error.what();
      }
      item->finish(outcome.status, std::move(outcome.error));
    }
  }

  // Deletes records until there is room at open: the directory may have been filled under a larger capacity.
  void settle() {
    const auto until = Clock::now() + kOpenPatience;
    const auto held = usage_.lock(Usage::Hold::kExclusive, [&] { return Clock::now() >= until; });
    if (held) pass(backend_.capacity_nbytes_, [] { return false; });
  }

 private:
  using GiveUp = std::function<bool()>;

  // A file in tmp/ with the bytes reserved for it. Unless published, both go when it goes.
  class Temporary {
   public:
    Temporary(FileLane& lane, std::uint64_t nbytes) : lane_(lane), nbytes_(nbytes) {}
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;
    ~Temporary() {
      if (path_.empty()) {
        // Never created: the caller still holds the lock under which it reserved.
        lane_.usage_.release(nbytes_);
      } else if (!published_) {
        lane_.remove(path_, nbytes_);
      }
    }

    // Returns 0 or an errno. Under the lock: a pass must not see it before its writer holds its flock and
    // before it has its full size.
    int create() {
      path_ = lane_.temporary_path();
      file_ =
          Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kFileMode));
      if (!file_) {
        path_.clear();
        return errno;
      }
      flock(file_.get(), LOCK_EX | LOCK_NB);
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
      case Op::kGet:
        return get(item, path);
      case Op::kContains:
      case Op::kTouch:
        return contains(path);
      case Op::kDelete:
        return remove_record(path);
    }
    return {Status::kFault, "unknown operation"};
  }

  // ---- get

  Outcome get(const Item& item, const std::string& path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!file) {
      const int error = errno;
      if (error == ENOENT) return {Status::kMiss};
      if (error == ELOOP || error == ENXIO) return damaged(path, Damage::kLength);  // a link; a socket
      return unreadable(path, error);
    }
    struct stat info;
    if (fstat(file.get(), &info) != 0) return fault("get", path, errno);
    const std::span<std::byte> payload = item.buffer();
    if (!S_ISREG(info.st_mode)) return damaged(path, Damage::kLength);
    if (static_cast<std::uint64_t>(info.st_size) < kRecordHeaderNbytes)
      return damaged(path, Damage::kTruncated);

    RecordHeader header;
    std::size_t got = 0;  // payload bytes read
    {
      const std::span<std::byte> first = payload.first(std::min(payload.size(), kChunkNbytes));
      const iovec parts[2] = {{&header, sizeof header}, {first.data(), first.size()}};
      const ssize_t n = retry([&] { return preadv(file.get(), parts, 2, 0); });
      if (n < 0) return unreadable(path, errno);
      if (static_cast<std::size_t>(n) < sizeof header) return damaged(path, Damage::kTruncated);
      got = static_cast<std::size_t>(n) - sizeof header;
    }
    if (const Damage damage = check_header(header, item.key(), payload.size()); damage != Damage::kNone) {
      return damaged(path, damage);
    }
    if (static_cast<std::uint64_t>(info.st_size) != kRecordHeaderNbytes + payload.size()) {
      return damaged(path, Damage::kLength);
    }
    RecordChecksum checksum(header);
    checksum.update(payload.first(got));
    while (got < payload.size()) {
      if (const auto stopped = item.stopped()) return {*stopped};
      const std::span<std::byte> chunk = payload.subspan(got, std::min(payload.size() - got, kChunkNbytes));
      const ssize_t n = retry([&] {
        return pread(file.get(), chunk.data(), chunk.size(), static_cast<off_t>(kRecordHeaderNbytes + got));
      });
      if (n < 0) return unreadable(path, errno);
      if (n == 0) return damaged(path, Damage::kLength);
      checksum.update(chunk.first(static_cast<std::size_t>(n)));
      got += static_cast<std::size_t>(n);
    }
    if (checksum.digest() != header.checksum) return damaged(path, Damage::kChecksum);
    mark_used(file.get());
    return {Status::kOk};
  }

  // Counts and removes a record that cannot be what it claims to be. A good one that a writer renames into
  // its place just now goes with it: that is a miss more, never a wrong byte.
  Outcome damaged(const std::string& path, Damage damage) {
    remove(path);
    return counted(damage);
  }

  // A record that contains() finds and nobody can read would fail every load of its prefix, and never be put again:
  // it goes as well. Where it cannot even be removed, the file system is at fault and not the record.
  Outcome unreadable(const std::string& path, int error) {
    if ((error == EACCES || error == EIO) && remove(path) == 0) return counted(Damage::kTruncated);
    return fault("get", path, error);
  }

  Outcome counted(Damage damage) {
    backend_.damaged_[static_cast<std::size_t>(damage)].fetch_add(1, std::memory_order_relaxed);
    return {Status::kMiss};
  }

  // ---- contains, delete

  Outcome contains(const std::string& path) const {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) {
      return errno == ENOENT ? Outcome{Status::kMiss} : fault("contains", path, errno);
    }
    const bool record = S_ISREG(info.st_mode) && info.st_size > static_cast<off_t>(kRecordHeaderNbytes);
    return {record ? Status::kOk : Status::kMiss};
  }

  Outcome remove_record(const std::string& path) {
    if (const int error = remove(path); error != 0) {
      return error == ENOENT ? Outcome{Status::kMiss} : fault("delete", path, error);
    }
    return {Status::kOk};
  }

  // Removes what lies in a record's place, whatever it is, but for a directory that is not empty. Returns 0 or
  // an errno.
  int remove(const std::string& path) {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) return errno;
    if (S_ISDIR(info.st_mode)) return rmdir(path.c_str()) == 0 ? 0 : errno;
    return remove(path, S_ISREG(info.st_mode) ? static_cast<std::uint64_t>(info.st_size) : 0);
  }

  // Unlinks a file and takes its bytes off the counter. If the lock is not to be had soon, a pass is under
  // way: then the bytes stay counted until the next one, for too high a counter is safe and too low a one is not.
  int remove(const std::string& path, std::uint64_t nbytes) {
    const auto until = Clock::now() + kGiveBackPatience;
    const auto held = usage_.lock(Usage::Hold::kShared, [&] { return Clock::now() >= until; });
    if (unlink(path.c_str()) != 0) return errno;
    if (held) usage_.release(nbytes);
    return 0;
  }

  // ---- put

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
    if (usage_.invented()) {
      const auto held = usage_.lock(Usage::Hold::kExclusive, give_up);
      if (held) pass(backend_.capacity_nbytes_, give_up);
    }

    std::optional<Temporary> temporary;
    {
      auto held = usage_.lock(Usage::Hold::kShared, give_up);
      if (held && !usage_.reserve(nbytes, backend_.capacity_nbytes_)) {
        held.reset();
        held = usage_.lock(Usage::Hold::kExclusive, give_up);
        if (held && !usage_.reserve(nbytes, backend_.capacity_nbytes_)) {
          const std::uint64_t full_enough = backend_.capacity_nbytes_ / 10 * 9;
          pass(full_enough > nbytes ? full_enough - nbytes : 0, give_up);
          if (!usage_.reserve(nbytes, backend_.capacity_nbytes_)) {
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
        return error == ENOENT ? recreate(backend_.root_ + "/tmp") : error;
      }
    }

    if (const auto decided = write(item, temporary->fd(), outcome); decided >= 0) return decided;
    mark_used(temporary->fd());

    const auto held = usage_.lock(Usage::Hold::kShared, give_up);
    if (!held) {
      outcome = {item.stopped().value_or(Status::kTimedOut)};
      return 0;
    }
    const int error = publish(*temporary, path);
    if (error == 0) outcome = {Status::kOk};
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
  // exactly what it took away, so that the counter stays true.
  int publish(Temporary& temporary, const std::string& path) {
    const char* from = temporary.path().c_str();
    const char* to = path.c_str();
    bool made_directory = false;
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
            usage_.release(static_cast<std::uint64_t>(old.st_size));
          break;
        }
        if (errno == ENOENT) continue;  // deleted in between
      }
      if (errno == EINVAL || errno == ENOSYS) return publish_plainly(temporary, path);
      if (errno != ENOENT || made_directory) return errno;
      made_directory = true;
      const std::string directory = path.substr(0, path.rfind('/'));
      if (const int error = make_directories(directory); error != 0) return error;
    }
    temporary.set_published();
    return 0;
  }

  // For file systems that cannot exchange: two writers of one key may leave its bytes counted twice until the
  // next pass.
  int publish_plainly(Temporary& temporary, const std::string& path) {
    struct stat old;
    const bool there = lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode);
    if (rename(temporary.path().c_str(), path.c_str()) != 0) {
      if (errno != ENOENT) return errno;
      if (const int error = make_directories(path.substr(0, path.rfind('/'))); error != 0) return error;
      if (rename(temporary.path().c_str(), path.c_str()) != 0) return errno;
    }
    if (there) usage_.release(static_cast<std::uint64_t>(old.st_size));
    temporary.set_published();
    return 0;
  }

  // ---- room

  // Under the exclusive lock.
  void pass(std::uint64_t target_nbytes, const GiveUp& give_up) {
    const Evicted evicted = run_pass(backend_.root_, usage_, target_nbytes, give_up);
    backend_.passes_.fetch_add(1, std::memory_order_relaxed);
    backend_.evicted_.fetch_add(evicted.records, std::memory_order_relaxed);
    backend_.evicted_nbytes_.fetch_add(evicted.nbytes, std::memory_order_relaxed);
  }

  // Returns a status when the item is to be given up.
  std::optional<Status> make_space(const Item& item, std::uint64_t nbytes) {
    const GiveUp give_up = [&item] { return item.stopped().has_value(); };
    const auto held = usage_.lock(Usage::Hold::kExclusive, give_up);
    if (held) {
      const std::uint64_t used = usage_.used_nbytes();
      const std::uint64_t free_nbytes = std::max(nbytes, used / 10);
      pass(used > free_nbytes ? used - free_nbytes : 0, give_up);
    }
    return item.stopped();
  }

  // Finds out that the directory was removed (and perhaps made again by another process), and starts anew in it.
  int refresh() {
    if (usage_.current()) return 0;
    try {
      if (const int error = make_directories(backend_.root_ + "/tmp"); error != 0) return error;
      if (const int error = make_directories(backend_.root_ + "/blocks"); error != 0) return error;
      usage_ = Usage(backend_.root_ + "/usage");
    } catch (const std::filesystem::filesystem_error& error) {
      return error.code().value();
    }
    return 0;
  }

  // Returns ENOENT (try again) or what stands in the way.
  static int recreate(const std::string& path) {
    const int error = make_directories(path);
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
  const unsigned index_;
  Usage usage_;
  std::uint64_t sequence_ = 0;
  std::random_device random_;
};

FileBackend::FileBackend(const std::string& root, std::uint64_t capacity_nbytes)
    : root_(std::filesystem::absolute(root).lexically_normal()), capacity_nbytes_(capacity_nbytes) {
  while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
  for (const char* part : {"/tmp", "/blocks"}) {
    const std::string path = root_ + part;
    int error = make_directories(path);
    if (error == 0 && access(path.c_str(), R_OK | W_OK | X_OK) != 0) error = errno;
    if (error != 0) {
      throw std::filesystem::filesystem_error("cannot use", path,
                                              std::error_code(error, std::generic_category()));
    }
  }
  FileLane(*this, 0).settle();
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
  counters.emplace_back("stored_nbytes", Usage::read(root_ + "/usage"));
}

}  // namespace kvpool
