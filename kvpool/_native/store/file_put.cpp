// Puts of the file backend: reservation, temporary file, bytes, rename. See file.h.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "store/descriptor.h"
#include "store/file.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr int kMaxAttempts = 3;  // of a put whose directories vanish meanwhile
constexpr auto kPutCounting = 5ms;

int rename2(const char* from, const char* to, unsigned flags) {
#ifdef __GLIBC__
  return renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
#else  // musl has had it since 1.2.5 only
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
#endif
}

bool no_space(int error) { return error == ENOSPC || error == EDQUOT; }

}  // namespace

// A file in tmp/ with reserved bytes. Its destructor frees both unless published.
class FileIoThread::Temporary {
 public:
  // Of an evicted file; none: there is none of these bytes. Under the lock.
  static std::optional<Temporary> reuse(FileIoThread& io_thread, std::uint64_t payload_nbytes) {
    const std::uint64_t nbytes = file_nbytes(payload_nbytes);
    const auto counted = static_cast<std::int64_t>(nbytes);
    for (;;) {
      const std::string path = io_thread.temporary_path();
      if (!io_thread.free_.take(nbytes, path)) return std::nullopt;
      Descriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
      struct stat info;
      if (file && fstat(file.get(), &info) == 0 && info.st_nlink == 1 && file_nbytes(info) == nbytes) {
        flock(file.get(), LOCK_EX | LOCK_NB);
        const auto size = static_cast<off_t>(file_size(payload_nbytes));
        if (info.st_size == size || ftruncate(file.get(), size) == 0) {
          io_thread.backend_.direct_.apply(file.get());
          io_thread.usage_->change({{kTemporaries, counted}, {kFree, -counted}});
          return Temporary(io_thread, nbytes, path, std::move(file));
        }
      }
      unlink(path.c_str());
      io_thread.usage_->change({{kFree, -counted}});
    }
  }
  Temporary(FileIoThread& io_thread, std::uint64_t nbytes) : io_thread_(io_thread), nbytes_(nbytes) {}
  Temporary(Temporary&& other) noexcept
      : io_thread_(other.io_thread_),
        nbytes_(std::exchange(other.nbytes_, 0)),
        path_(std::move(other.path_)),
        file_(std::move(other.file_)) {}
  Temporary& operator=(Temporary&&) = delete;
  ~Temporary() {
    if (nbytes_ == 0) return;  // moved
    if (path_.empty()) {
      // Never created: the caller still holds the lock of the reservation.
      io_thread_.give_back(kTemporaries, nbytes_);
    } else if (!published_) {
      io_thread_.remove(path_, kTemporaries, nbytes_);
    }
  }

  // Returns 0 or an errno. Under the lock: other processes must see it only with its flock and its full size.
  int create(std::uint64_t payload_nbytes) {
    path_ = io_thread_.temporary_path();
    const mode_t mode = io_thread_.pool_.file_mode;
    file_ = Descriptor(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!file_) {
      path_.clear();
      return errno;
    }
    flock(file_.get(), LOCK_EX | LOCK_NB);
    if ((mode & S_IWGRP) != 0) fchmod(file_.get(), mode);  // whatever the umask
    if (ftruncate(file_.get(), static_cast<off_t>(file_size(payload_nbytes))) != 0) return errno;
    io_thread_.backend_.direct_.apply(file_.get());
    return 0;
  }
  int fd() const { return file_.get(); }
  const std::string& path() const { return path_; }
  void set_published() { published_ = true; }

 private:
  Temporary(FileIoThread& io_thread, std::uint64_t nbytes, std::string path, Descriptor file)
      : io_thread_(io_thread), nbytes_(nbytes), path_(std::move(path)), file_(std::move(file)) {}

  FileIoThread& io_thread_;
  std::uint64_t nbytes_;
  std::string path_;
  Descriptor file_;
  bool published_ = false;
};

FileIoThread::Outcome FileIoThread::put_absent(const Item& item, const std::string& path) {
  // The touch tells the present value's length in place of our value's seal, which is kept for the put.
  const Outcome found = touch(item, path);
  if (found.status == Status::kOk) return {Status::kPresent};
  return found.status == Status::kMiss ? put(item, path) : found;
}

FileIoThread::Outcome FileIoThread::put(const Item& item, const std::string& path) {
  const std::uint64_t nbytes = file_nbytes(item.buffer().size());
  if (nbytes > backend_.capacity_.nbytes()) return {Status::kNoRoom};
  bool made_space = false;
  int error = 0;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    Outcome outcome{Status::kFault};
    error = put_once(item, path, nbytes, outcome);
    if (error == 0) return outcome;
    if (error == ENOENT) continue;
    if (!no_space(error)) break;
    // The file system is full despite its reserve: others filled it meanwhile, or a quota or its inodes ended.
    if (made_space) return {Status::kNoRoom};
    made_space = true;
    if (const auto stopped = make_space(item, nbytes)) return {*stopped};
  }
  if (no_space(error)) return {Status::kNoRoom};
  return fault("put", path, error);
}

// Opens a file for a put, an evicted one if there is one. False: there is no room. Under the lock.
bool FileIoThread::begin(std::optional<Temporary>& temporary, std::uint64_t payload_nbytes,
                         std::uint64_t capacity_nbytes, Usage::Known known, int& error) {
  const std::uint64_t nbytes = file_nbytes(payload_nbytes);
  if (usage_->may_reuse(nbytes, capacity_nbytes)) {
    if (auto reused = Temporary::reuse(*this, payload_nbytes)) {
      temporary.emplace(std::move(*reused));
      return true;
    }
  }
  if (!usage_->reserve(nbytes, capacity_nbytes, known)) return false;
  temporary.emplace(*this, nbytes);
  error = temporary->create(payload_nbytes);
  return true;
}

// Returns 0 when `outcome` is decided, else an errno. ENOENT: try again, as a directory was removed, or the file system
// refused to be written past its cache.
int FileIoThread::put_once(const Item& item, const std::string& path, std::uint64_t nbytes,
                           Outcome& outcome) {
  const GiveUp give_up = [&item] { return item.stopped().has_value(); };
  if (const int error = refresh(); error != 0) return error;
  const std::uint64_t payload_nbytes = item.buffer().size();
  std::uint64_t capacity_nbytes = backend_.capacity_.nbytes();

  std::optional<Temporary> temporary;
  {
    auto held = lock(Usage::Hold::kShared, give_up);
    int error = 0;
    if (held && !begin(temporary, payload_nbytes, capacity_nbytes, Usage::Known::kAll, error)) {
      held.reset();
      held = lock(Usage::Hold::kExclusive, give_up);
      if (held) {
        count(backend_.root_, *usage_, free_, Clock::now() + kPutCounting);
        capacity_nbytes = backend_.capacity_.settle(usage_->read().sum().nbytes, pool_.file_mode);
      }
      const auto begin_now = [&] {
        return begin(temporary, payload_nbytes, capacity_nbytes, Usage::Known::kEstimated, error);
      };
      const auto trim_and_begin = [&] {
        trim(*usage_, free_, nbytes, capacity_nbytes);
        return begin_now();
      };
      if (held && !begin_now() && !trim_and_begin()) {
        evict(nbytes, capacity_nbytes, give_up);
        if (!begin_now() && !trim_and_begin()) {
          outcome = {item.stopped().value_or(Status::kNoRoom)};
          return 0;
        }
      }
    }
    if (!held) {
      outcome = {item.stopped().value_or(Status::kTimedOut)};
      return 0;
    }
    if (error != 0) {
      if (temporary->fd() >= 0) held.reset();  // its destructor takes the lock to return the bytes
      temporary.reset();
      return error == ENOENT ? make_again(backend_.root_ + "/tmp") : error;
    }
  }

  if (const auto decided = write(item, temporary->fd(), outcome); decided >= 0) return decided;
  mark_used(temporary->fd(), item.used_at());

  const auto held = lock(Usage::Hold::kShared, give_up);
  if (!held) {
    outcome = {item.stopped().value_or(Status::kTimedOut)};
    return 0;
  }
  // Counted in its bucket before the rename: a process killed in between leaves a too high count.
  const unsigned bucket = bucket_of(item.key());
  const auto counted = static_cast<std::int64_t>(nbytes);
  std::uint64_t replaced_nbytes = 0;
  usage_->change({{bucket, counted}, {kTemporaries, -counted}});
  const int error = publish(*temporary, path, replaced_nbytes);
  if (error != 0) {
    usage_->change({{kTemporaries, counted}, {bucket, -counted}});
  } else {
    const auto replaced = static_cast<std::int64_t>(replaced_nbytes);
    if (replaced != 0) usage_->change({{kFree, replaced}, {bucket, -replaced}});
    outcome = {Status::kOk};
  }
  return error;
}

// Returns -1, else as put_once().
int FileIoThread::write(const Item& item, int fd, Outcome& outcome) {
  const Seal of_item = item.seal();
  const std::uint64_t payload_nbytes = item.buffer().size();
  const auto seal = [&](RecordChecksum& checksum) {
    const RecordHeader header = seal_record(item.key(), payload_nbytes, of_item, checksum);
    item.tell({payload_nbytes, Seal{header.writer, header.checksum}});
    return header;
  };
  const auto give_up = [&] { return item.stopped().has_value(); };
  switch (record_file_.write(fd, item.buffer(), !of_item.checksum, seal, give_up)) {
    case RecordFile::End::kWhole:
      return -1;
    case RecordFile::End::kGivenUp:
      outcome = {item.stopped().value_or(Status::kTimedOut)};
      return 0;
    case RecordFile::End::kCut:
      return EIO;
    case RecordFile::End::kError:
      break;
  }
  const int error = errno;
  return record_file_.asks_less(fd, error) ? ENOENT : error;
}

// Under the lock. An exchange, unlike a replacement, tells each concurrent writer which file it removed:
// counts stay true.
int FileIoThread::publish(Temporary& temporary, const std::string& path, std::uint64_t& replaced_nbytes) {
  const char* from = temporary.path().c_str();
  const char* to = path.c_str();
  bool made_folder = false;
  for (;;) {
    if (rename2(from, to, RENAME_NOREPLACE) == 0) break;
    if (errno == EEXIST) {
      if (rename2(from, to, RENAME_EXCHANGE) == 0) {
        struct stat old;
        if (lstat(from, &old) != 0) break;
        if (S_ISDIR(old.st_mode)) {
          if (rmdir(from) == 0) break;
          rename2(from, to, RENAME_EXCHANGE);
          return EISDIR;
        }
        if (S_ISREG(old.st_mode) && free_.give(from, file_nbytes(old)) == 0) {
          replaced_nbytes = file_nbytes(old);
        } else {
          unlink(from);
        }
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

// Without exchange the key is absent for a moment, and concurrent writers may count its bytes twice until the next count.
int FileIoThread::publish_plainly(Temporary& temporary, const std::string& path,
                                  std::uint64_t& replaced_nbytes) {
  struct stat old;
  if (lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode) && free_.give(path, file_nbytes(old)) == 0)
    replaced_nbytes = file_nbytes(old);
  if (rename(temporary.path().c_str(), path.c_str()) != 0) {
    if (errno != ENOENT) return errno;
    if (const int error = make_bucket(path); error != 0) return error;
    if (rename(temporary.path().c_str(), path.c_str()) != 0) return errno;
  }
  temporary.set_published();
  return 0;
}

// Creates a record's bucket; ENOENT when all of blocks/ is gone.
int FileIoThread::make_bucket(const std::string& path) const {
  const int error = make_folder(pool_, path.substr(0, path.rfind('/')));
  return error == ENOENT ? make_again(backend_.root_ + "/blocks") : error;
}

// For a put on a full file system. Returns a status when the item is given up.
std::optional<Status> FileIoThread::make_space(const Item& item, std::uint64_t nbytes) {
  const GiveUp give_up = [&item] { return item.stopped().has_value(); };
  const auto held = lock(Usage::Hold::kExclusive, give_up);
  if (held) {
    count(backend_.root_, *usage_, free_, Clock::now() + kPutCounting);
    // As if the present bytes were the capacity.
    const std::uint64_t present_nbytes = usage_->read().sum().nbytes;
    trim(*usage_, free_, nbytes, present_nbytes);
    evict(nbytes, present_nbytes, give_up);
    trim(*usage_, free_, nbytes, present_nbytes);
  }
  return item.stopped();
}

}  // namespace kvpool
