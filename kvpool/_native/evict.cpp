#include "evict.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <queue>
#include <string_view>
#include <vector>

#include "descriptor.h"

namespace kvpool {
namespace {

constexpr std::int64_t kStaleTemporaryAge_s = 600;  // only where the file system has no flock

struct CloseDirectory {
  void operator()(DIR* directory) const { closedir(directory); }
};
using Directory = std::unique_ptr<DIR, CloseDirectory>;

Directory open_directory(const std::string& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!file) return nullptr;
  Directory directory(fdopendir(file.get()));
  if (directory) file.release();
  return directory;
}

// Calls visit(name) for each entry; returns how many entries are left, so that an empty directory can go.
template <typename Visit>
std::size_t for_each_entry(const Directory& directory, Visit visit) {
  std::size_t left = 0;
  while (const dirent* entry = readdir(directory.get())) {
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (visit(entry->d_name)) ++left;
  }
  return left;
}

struct Candidate {
  std::int64_t used_at_ns;
  std::uint64_t nbytes;
  std::uint32_t directory;
  std::string name;
  bool operator<(const Candidate& other) const { return used_at_ns < other.used_at_ns; }
};

// The oldest records that together are at least `wanted_nbytes`; bounded by what is to be deleted, not by the tree.
class Oldest {
 public:
  explicit Oldest(std::uint64_t wanted_nbytes) : wanted_nbytes_(wanted_nbytes) {}

  bool wants(std::int64_t used_at_ns) const {
    return nbytes_ < wanted_nbytes_ || (!heap_.empty() && used_at_ns < heap_.top().used_at_ns);
  }
  void add(Candidate candidate) {
    nbytes_ += candidate.nbytes;
    heap_.push(std::move(candidate));
    while (nbytes_ - heap_.top().nbytes >= wanted_nbytes_) {
      nbytes_ -= heap_.top().nbytes;
      heap_.pop();
    }
  }
  std::vector<Candidate> oldest_first() && {
    std::vector<Candidate> sorted(heap_.size());
    for (std::size_t i = sorted.size(); i-- > 0; heap_.pop()) sorted[i] = heap_.top();
    return sorted;
  }

 private:
  std::uint64_t wanted_nbytes_;
  std::uint64_t nbytes_ = 0;
  std::priority_queue<Candidate> heap_;  // the youngest on top
};

// A writer holds the flock of its temporary file for as long as it lives, in whatever pid namespace.
bool writer_is_dead(const std::string& path, const struct stat& info) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file && flock(file.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (file && errno == EWOULDBLOCK) return false;
  return time(nullptr) - info.st_mtim.tv_sec > kStaleTemporaryAge_s;
}

std::uint64_t sweep_temporaries(const std::string& path) {
  const Directory directory = open_directory(path);
  if (!directory) return 0;
  std::uint64_t nbytes = 0;
  for_each_entry(directory, [&](const char* name) {
    struct stat info;
    const int fd = dirfd(directory.get());
    if (fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) return true;
    if (writer_is_dead(path + "/" + name, info) && unlinkat(fd, name, 0) == 0) return false;
    nbytes += static_cast<std::uint64_t>(info.st_size);
    return true;
  });
  return nbytes;
}

class Scan {
 public:
  Scan(const std::string& blocks, std::uint64_t wanted_nbytes, const std::function<bool()>& give_up)
      : oldest_(wanted_nbytes), give_up_(give_up) {
    descend(blocks, 0);
  }

  bool given_up() const { return given_up_; }
  std::uint64_t nbytes() const { return nbytes_; }
  std::string path(const Candidate& candidate) const {
    return directories_[candidate.directory] + "/" + candidate.name;
  }
  std::vector<Candidate> oldest_first() { return std::move(oldest_).oldest_first(); }

 private:
  static constexpr int kShardDepth = 3;  // blocks/tenant/namespace/shard

  // Returns whether the directory still has entries. An empty one is removed on the way out: no writer is
  // between its mkdir and its rename, for that is done under the lock.
  bool descend(const std::string& path, int depth) {
    const Directory directory = open_directory(path);
    if (!directory) return true;
    const int fd = dirfd(directory.get());
    const std::size_t left = for_each_entry(directory, [&](const char* name) {
      if (given_up_) return true;
      if (depth == kShardDepth) {
        add_file(fd, name, path);
        return true;
      }
      const std::string child = path + "/" + name;
      return descend(child, depth + 1) || unlinkat(fd, name, AT_REMOVEDIR) != 0;
    });
    given_up_ = given_up_ || give_up_();
    return left != 0 || given_up_;
  }

  void add_file(int fd, const char* name, const std::string& path) {
    struct stat info;
    if (fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) return;
    const auto nbytes = static_cast<std::uint64_t>(info.st_size);
    nbytes_ += nbytes;
    const std::int64_t used_at_ns = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec;
    if (!oldest_.wants(used_at_ns)) return;
    if (directories_.empty() || directories_.back() != path) directories_.push_back(path);
    oldest_.add({used_at_ns, nbytes, static_cast<std::uint32_t>(directories_.size() - 1), name});
  }

  Oldest oldest_;
  const std::function<bool()>& give_up_;
  std::vector<std::string> directories_;
  std::uint64_t nbytes_ = 0;
  bool given_up_ = false;
};

}  // namespace

Evicted run_pass(const std::string& root, Usage& usage, std::uint64_t target_nbytes,
                 const std::function<bool()>& give_up) {
  Evicted evicted;
  // How much to collect is guessed from the counter; if that was too low, the second round knows the truth.
  for (int round = 0; round < 2; ++round) {
    const std::uint64_t temporaries = sweep_temporaries(root + "/tmp");
    const std::uint64_t used = usage.used_nbytes();
    Scan scan(root + "/blocks", used > target_nbytes ? used - target_nbytes : 0, give_up);
    if (scan.given_up()) return evicted;
    std::uint64_t truth = temporaries + scan.nbytes();
    usage.set(truth);
    for (const Candidate& candidate : scan.oldest_first()) {
      if (truth <= target_nbytes || give_up()) break;
      if (unlink(scan.path(candidate).c_str()) != 0) continue;
      truth -= candidate.nbytes;
      usage.set(truth);
      ++evicted.records;
      evicted.nbytes += candidate.nbytes;
    }
    if (truth <= target_nbytes || give_up()) break;
  }
  return evicted;
}

}  // namespace kvpool
