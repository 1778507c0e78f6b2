// Counts buckets and picks records to evict.

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "store/descriptor.h"
#include "store/file.h"

namespace kvpool {
namespace {

constexpr std::int64_t kStaleTemporaryAge_s = 600;  // only without flock in the file system
constexpr std::size_t kSampleRecords =
    1024;  // a tenth of this sample is a tenth of the store, give or take a hundredth
constexpr std::uint64_t kEvictedPart = 10;  // of a sample: every tenth
constexpr unsigned kLeastCounted = 16;      // buckets; enough to extrapolate
constexpr std::int64_t kClockSlack_ns = 1'000'000'000;

struct Entry {
  std::int64_t used_at_ns;
  std::uint64_t nbytes;
  unsigned bucket;
  std::string name;
};

// {pid}.{io_thread}.{sequence}.{random}
bool is_temporary_name(std::string_view name) {
  int parts = 0;
  for (std::size_t begin = 0; begin <= name.size(); ++parts) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    std::uint64_t number = 0;
    const auto [last, error] = std::from_chars(name.data() + begin, name.data() + end, number);
    if (error != std::errc{} || last != name.data() + end) return false;
    begin = end + 1;
  }
  return parts == 4;
}

// A living writer holds its temporary file's flock, in whatever pid namespace.
bool writer_is_dead(int fd, const char* name, const struct stat& info) {
  const Descriptor file(openat(fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file && flock(file.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (file && errno == EWOULDBLOCK) return false;
  return time(nullptr) - info.st_mtim.tv_sec > kStaleTemporaryAge_s;
}

// Returns the bytes of living writers' files.
std::uint64_t sweep_temporaries(const std::string& root) {
  const Folder folder = open_folder(AT_FDCWD, (root + "/tmp").c_str());
  if (!folder) return 0;
  std::uint64_t nbytes = 0;
  for_each_entry(folder, [&](const char* name) {
    struct stat info;
    const int fd = dirfd(folder.get());
    if (!is_temporary_name(name) || fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode) || (writer_is_dead(fd, name, info) && unlinkat(fd, name, 0) == 0)) {
      return;
    }
    nbytes += file_nbytes(info);
  });
  return nbytes;
}

// Appends a bucket's records to `entries`; returns their bytes, or nothing if unreadable.
std::optional<std::uint64_t> look(const std::string& root, unsigned bucket, std::vector<Entry>& entries) {
  const Folder folder = open_folder(AT_FDCWD, bucket_path(root, bucket).c_str());
  if (!folder) return errno == ENOENT ? std::optional<std::uint64_t>(0) : std::nullopt;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const std::int64_t now_ns = now.tv_sec * 1'000'000'000 + now.tv_nsec;
  const int fd = dirfd(folder.get());
  std::uint64_t sum = 0;
  for_each_entry(folder, [&](const char* name) {
    struct stat info;
    if (!is_record_name(bucket, name) || fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode)) {
      return;
    }
    std::int64_t used_at_ns = info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec;
    if (used_at_ns > now_ns + kClockSlack_ns) {
      // The clock was set back: the record would outlive all future uses.
      used_at_ns = now_ns;
      const timespec times[2] = {now, now};
      [[maybe_unused]] const int ignored = utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW);
    }
    const std::uint64_t nbytes = file_nbytes(info);
    sum += nbytes;
    entries.push_back({used_at_ns, nbytes, bucket, name});
  });
  return sum;
}

struct Sample {
  std::vector<Entry> entries;
  std::vector<std::pair<unsigned, std::uint64_t>> held;  // bytes of each sampled bucket
  std::uint64_t nbytes = 0;
  bool whole = true;  // the sample covers the whole store
};

// Samples from the cursor until enough records are found. Corrects the buckets' counts.
Sample take_sample(const std::string& root, Usage& usage, const GiveUp& give_up) {
  Sample sample;
  UsagePage page = usage.read();
  const auto first = static_cast<unsigned>(page.cursor % kBuckets);
  for (unsigned i = 0; i < kBuckets; ++i) {
    const unsigned bucket = (first + i) % kBuckets;
    if (page.nbytes(bucket) == std::uint64_t{0}) continue;
    if (!sample.entries.empty() && (sample.entries.size() >= kSampleRecords || give_up())) {
      sample.whole = false;
      break;
    }
    const auto nbytes = look(root, bucket, sample.entries);
    page.cursor = page.cursor / kBuckets * kBuckets + bucket + 1;
    if (!nbytes) continue;
    page.set(bucket, *nbytes);
    sample.held.emplace_back(bucket, *nbytes);
    sample.nbytes += *nbytes;
  }
  usage.write(page);
  return sample;
}

// `keeps`: their files go to free/; else, or where that fails, away.
Evicted evict_oldest(const std::string& root, Usage& usage, FreeFiles& free, Sample& sample,
                     std::uint64_t wanted_nbytes, bool keeps) {
  Evicted evicted;
  std::uint64_t freed_nbytes = 0;
  std::sort(sample.entries.begin(), sample.entries.end(),
            [](const Entry& a, const Entry& b) { return a.used_at_ns < b.used_at_ns; });
  std::sort(sample.held.begin(), sample.held.end());
  for (const Entry& entry : sample.entries) {
    if (evicted.nbytes >= wanted_nbytes) break;
    const std::string path = bucket_path(root, entry.bucket) + "/" + entry.name;
    if (keeps && free.give(path, entry.nbytes) == 0) {
      freed_nbytes += entry.nbytes;
    } else if (unlink(path.c_str()) != 0) {
      continue;
    }
    ++evicted.records;
    evicted.nbytes += entry.nbytes;
    const auto held = std::lower_bound(sample.held.begin(), sample.held.end(), entry.bucket,
                                       [](const auto& one, unsigned bucket) { return one.first < bucket; });
    held->second -= entry.nbytes;
  }
  // Subtracted afterwards: a process killed in between leaves too high counts, until the next count.
  UsagePage page = usage.read();
  if (const auto count = page.nbytes(kFree)) page.set(kFree, *count + freed_nbytes);
  for (const auto& [bucket, nbytes] : sample.held) {
    page.set(bucket, nbytes);
    // Under the lock no writer is between its mkdir and its rename.
    if (nbytes == 0) rmdir(bucket_path(root, bucket).c_str());
  }
  usage.write(page);
  return evicted;
}

}  // namespace

void count(const std::string& root, Usage& usage, FreeFiles& free, Clock::time_point until) {
  UsagePage page = usage.read();
  for (const auto& [index, nbytes] :
       {std::pair(kTemporaries, sweep_temporaries(root)), std::pair(kFree, free.remove(0))}) {
    if (page.nbytes(index) == nbytes) continue;
    usage.set(index, nbytes);
    page.set(index, nbytes);
  }
  if (page.sum().unknown == 0) return;
  page.boot = boot_id();
  std::bitset<kBuckets> there;
  if (const Folder folder = open_folder(AT_FDCWD, (root + "/blocks").c_str())) {
    for_each_entry(folder, [&](const std::string_view name) {
      unsigned bucket = kBuckets;
      const auto [end, error] = std::from_chars(name.begin(), name.end(), bucket, 16);
      if (error == std::errc{} && end == name.end() && bucket < kBuckets) there.set(bucket);
    });
  }
  unsigned counted = 0;
  std::vector<Entry> ignored;
  for (unsigned bucket = 0; bucket < kBuckets; ++bucket) {
    if (page.nbytes(bucket)) continue;
    if (!there[bucket]) {
      page.set(bucket, 0);
    } else if (counted < kLeastCounted || Clock::now() < until) {
      ignored.clear();
      page.set(bucket, look(root, bucket, ignored).value_or(0));
      ++counted;
    }
  }
  usage.write(page);
}

Evicted make_room(const std::string& root, Usage& usage, FreeFiles& free, std::uint64_t n,
                  std::uint64_t capacity_nbytes, const GiveUp& give_up) {
  const auto free_nbytes = [](const UsagePage& page) { return page.nbytes(kFree).value_or(0); };
  const std::uint64_t useless_nbytes = free_nbytes(usage.read());
  const auto lacking_nbytes = [&] {
    const UsagePage page = usage.read();
    const std::uint64_t excess_nbytes = usage.excess_nbytes(page, n, capacity_nbytes);
    return excess_nbytes -
           std::min(excess_nbytes, free_nbytes(page) - std::min(free_nbytes(page), useless_nbytes));
  };
  Evicted evicted;
  for (std::size_t fruitless = 0; fruitless < kBuckets;) {
    if (lacking_nbytes() == 0) break;
    Sample sample = take_sample(root, usage, give_up);
    // The count may have been too high.
    const std::uint64_t lacking = lacking_nbytes();
    if (sample.entries.empty() || lacking == 0) break;
    std::uint64_t wanted_nbytes = std::max<std::uint64_t>(sample.nbytes / kEvictedPart, 1);
    if (sample.whole) wanted_nbytes += lacking;
    // What is above the capacity is not to be overwritten. So free/ stays small: each pass lists it.
    const bool keeps = usage.excess_nbytes(usage.read(), 0, capacity_nbytes) == 0;
    const Evicted gone = evict_oldest(root, usage, free, sample, wanted_nbytes, keeps);
    evicted.records += gone.records;
    evicted.nbytes += gone.nbytes;
    fruitless = gone.records != 0 ? 0 : fruitless + sample.held.size();
    if (give_up() || (sample.whole && gone.records == 0)) break;
  }
  return evicted;
}

void trim(Usage& usage, FreeFiles& free, std::uint64_t n, std::uint64_t capacity_nbytes) {
  const UsagePage page = usage.read();
  const std::uint64_t excess_nbytes = usage.excess_nbytes(page, n, capacity_nbytes);
  if (excess_nbytes != 0 && page.nbytes(kFree) != 0) usage.set(kFree, free.remove(excess_nbytes));
}

}  // namespace kvpool
