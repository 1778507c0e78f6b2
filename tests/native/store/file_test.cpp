// The executor on the file backend.
// Over 400 lines because the backend is tested as one thing.
#include "store/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/descriptor.h"
#include "store/directory.h"
#include "store/executors.h"
#include "store/pool_directory.h"
#include "store/record_file.h"
#include "store/usage.h"

namespace kvpool {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

using test::counter;
using test::Directory;
using test::eventually;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kSmall = 4096;  // what a record of up to 4,016 bytes takes
const std::string kNamespace(32, 'a');

std::unique_ptr<IoExecutor> open_engine(const std::string& root, std::uint64_t capacity_nbytes,
                                        unsigned threads) {
  return std::make_unique<IoExecutor>(std::make_unique<FileBackend>(root, capacity_nbytes, 60s), threads);
}

// Why the directory is not taken; empty if it is.
std::string refusal(const std::string& root, std::optional<std::uint64_t> capacity_nbytes = kMiB) {
  try {
    const FileBackend backend(root, capacity_nbytes);
  } catch (const RefusedDirectory& error) {
    return error.what();
  }
  return {};
}

std::string hash_text(unsigned i) {
  char text[33];
  std::snprintf(text, sizeof text, "%08x%024x", i * 2654435761U, i);
  return text;
}

Key key_of(unsigned i) { return parse_key("kvpool:t:" + kNamespace + ":" + hash_text(i) + ":0:0"); }

fs::path path_of(const Directory& root, unsigned i) { return record_path(root.text(), key_of(i)); }

// Content that tells which key it belongs to.
std::vector<std::byte> payload_of(unsigned i, std::size_t n) {
  std::vector<std::byte> bytes(n);
  for (std::size_t at = 0; at + 8 <= n; at += 8) {
    const std::uint64_t word = (std::uint64_t{i} << 32) + at;
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
  return bytes;
}

std::vector<Status> run(IoExecutor& engine, Op op, const std::vector<unsigned>& ids,
                        std::vector<std::vector<std::byte>>& buffers, Clock::duration timeout = 20s,
                        std::string* error = nullptr) {
  std::vector<Key> keys;
  for (const unsigned i : ids) keys.push_back(key_of(i));
  std::vector<Batch::Buffer> spans;
  if (moves_bytes(op)) spans.assign(buffers.begin(), buffers.end());
  const auto batch = engine.submit(op, std::move(keys), std::move(spans), timeout);
  CHECK(batch->wait_until(Clock::now() + 60s));
  if (error != nullptr) *error = batch->error().value_or("");
  return {batch->results().begin(), batch->results().end()};
}

Status put(IoExecutor& engine, unsigned i, std::size_t n, std::string* error = nullptr) {
  std::vector<std::vector<std::byte>> buffers = {payload_of(i, n)};
  return run(engine, Op::kPut, {i}, buffers, 20s, error)[0];
}

// kOk only when the bytes are the right ones.
Status get(IoExecutor& engine, unsigned i, std::size_t n, std::string* error = nullptr) {
  std::vector<std::vector<std::byte>> buffers = {std::vector<std::byte>(n)};
  const Status status = run(engine, Op::kGet, {i}, buffers, 20s, error)[0];
  if (status == Status::kOk) CHECK(buffers[0] == payload_of(i, n));
  return status;
}

Status ask(IoExecutor& engine, Op op, unsigned i) {
  std::vector<std::vector<std::byte>> none;
  return run(engine, op, {i}, none)[0];
}

// Bytes of all files in blocks/, tmp/ and free/. Files may come and go meanwhile.
std::uint64_t tree_nbytes(const fs::path& root) {
  std::uint64_t sum = 0;
  for (const char* part : {"blocks", "tmp", "free"}) {
    std::error_code error;
    for (fs::recursive_directory_iterator it(root / part, error), end; !error && it != end;
         it.increment(error)) {
      struct stat info;
      if (lstat(it->path().c_str(), &info) == 0 && S_ISREG(info.st_mode)) sum += file_nbytes(info);
    }
  }
  return sum;
}

bool no_temporaries(const Directory& root) { return fs::is_empty(root / "tmp"); }

std::size_t count_descriptors() {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
}

}  // namespace

TEST(what_is_put_is_got) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 2);
  for (const std::size_t n : {std::size_t{1}, std::size_t{8}, kChunkNbytes - 1, kChunkNbytes,
                              kChunkNbytes + 1, std::size_t{3} << 20}) {
    const auto i = static_cast<unsigned>(n);
    CHECK(get(*engine, i, n) == Status::kMiss);
    CHECK(ask(*engine, Op::kContains, i) == Status::kMiss);
    CHECK(put(*engine, i, n) == Status::kOk);
    CHECK(ask(*engine, Op::kContains, i) == Status::kOk);
    CHECK(get(*engine, i, n) == Status::kOk);
    CHECK(fs::file_size(path_of(root, i)) == file_size(n));
  }
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
  CHECK(ask(*engine, Op::kDelete, 1) == Status::kOk);
  CHECK(ask(*engine, Op::kDelete, 1) == Status::kMiss);
  CHECK(get(*engine, 1, 1) == Status::kMiss);
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
  CHECK(no_temporaries(root));
  CHECK(engine->close(10s));
}

TEST(an_overwrite_replaces_and_is_counted_once) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  CHECK(put(*engine, 1, 5000) == Status::kOk);
  CHECK(get(*engine, 1, 5000) == Status::kOk);
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root) && tree_nbytes(root) == 3 * kSmall);
  CHECK(no_temporaries(root));
}

TEST(descriptors_are_closed) {
  const Directory root;
  const std::size_t before = count_descriptors();
  {
    const auto engine = open_engine(root.text(), 64 * kMiB, 3);
    CHECK(put(*engine, 1, 1000) == Status::kOk);
    CHECK(get(*engine, 1, 1000) == Status::kOk);
    CHECK(engine->close(10s));
    CHECK(count_descriptors() == before);
  }
  CHECK(count_descriptors() == before);
}

TEST(each_damage_is_a_miss_and_gone) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  constexpr std::size_t kNbytes = 600'000;
  const std::size_t kHeader = file_nbytes(kNbytes) - 80;
  const auto flip = [&](unsigned i, std::size_t at) {
    std::fstream file(path_of(root, i), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char old = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(old ^ 1));
  };
  struct Case {
    const char* counter;
    std::function<void(unsigned)> damage;
  };
  const std::vector<Case> cases = {
      {"damaged_magic", [&](unsigned i) { flip(i, kHeader); }},
      {"damaged_version", [&](unsigned i) { flip(i, kHeader + 4); }},
      {"damaged_flags", [&](unsigned i) { flip(i, kHeader + 6); }},
      {"damaged_length", [&](unsigned i) { flip(i, kHeader + 8); }},
      {"damaged_fingerprint", [&](unsigned i) { flip(i, kHeader + 16); }},
      {"damaged_hash", [&](unsigned i) { flip(i, kHeader + 32); }},
      {"damaged_group", [&](unsigned i) { flip(i, kHeader + 52); }},
      {"damaged_rank", [&](unsigned i) { flip(i, kHeader + 54); }},
      {"damaged_checksum", [&](unsigned i) { flip(i, kHeader + 56); }},
      {"damaged_checksum", [&](unsigned i) { flip(i, kHeader + 72); }},
      {"damaged_checksum", [&](unsigned i) { flip(i, 0); }},
      {"damaged_length", [&](unsigned i) { fs::resize_file(path_of(root, i), file_size(kNbytes) - 1); }},
      {"damaged_length", [&](unsigned i) { fs::resize_file(path_of(root, i), file_size(kNbytes) + 1); }},
      {"damaged_length", [&](unsigned i) { fs::resize_file(path_of(root, i), kSmall); }},
      {"damaged_truncated", [&](unsigned i) { fs::resize_file(path_of(root, i), kSmall - 1); }},
      {"damaged_truncated", [&](unsigned i) { fs::resize_file(path_of(root, i), 63); }},
      {"damaged_truncated", [&](unsigned i) { fs::resize_file(path_of(root, i), 0); }},
      {"damaged_length",
       [&](unsigned i) {
         fs::remove(path_of(root, i));
         CHECK(mkfifo(path_of(root, i).c_str(), 0600) == 0);
       }},
      {"damaged_length",
       [&](unsigned i) {
         fs::rename(path_of(root, i), root / "elsewhere");
         fs::create_symlink(root / "elsewhere", path_of(root, i));
       }},
      {"damaged_length",
       [&](unsigned i) {
         fs::remove(path_of(root, i));
         fs::create_directory(path_of(root, i));
       }},
  };
  for (unsigned i = 0; i < cases.size(); ++i) {
    CHECK(put(*engine, i, kNbytes) == Status::kOk);
    cases[i].damage(i);
    const std::uint64_t before = counter(*engine, cases[i].counter);
    CHECK(get(*engine, i, kNbytes) == Status::kMiss);
    CHECK(counter(*engine, cases[i].counter) == before + 1);
    CHECK(counter(*engine, "damaged") == i + 1);
    CHECK(!fs::exists(fs::symlink_status(path_of(root, i))));
    CHECK(put(*engine, i, kNbytes) == Status::kOk);
    CHECK(get(*engine, i, kNbytes) == Status::kOk);
  }
  // A record asked for with another length than it has is of no use to anybody either.
  CHECK(put(*engine, 99, 1000) == Status::kOk);
  CHECK(get(*engine, 99, 1001) == Status::kMiss);
  CHECK(!fs::exists(path_of(root, 99)));
}

TEST(a_put_over_something_strange_works_or_says_why) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  CHECK(put(*engine, 1, 100) == Status::kOk);
  fs::remove(path_of(root, 1));
  CHECK(mkfifo(path_of(root, 1).c_str(), 0600) == 0);
  CHECK(ask(*engine, Op::kContains, 1) == Status::kMiss);
  CHECK(put(*engine, 1, 100) == Status::kOk);
  CHECK(get(*engine, 1, 100) == Status::kOk);
  fs::remove(path_of(root, 1));
  fs::create_directory(path_of(root, 1));
  CHECK(ask(*engine, Op::kContains, 1) == Status::kMiss);
  CHECK(put(*engine, 1, 100) == Status::kOk);  // over an empty directory
  CHECK(get(*engine, 1, 100) == Status::kOk);
  CHECK(counter(*engine, "stored_nbytes") >= tree_nbytes(root) && tree_nbytes(root) == kSmall);
  fs::remove(path_of(root, 1));
  fs::create_directories(path_of(root, 1) / "inside");
  std::string error;
  CHECK(put(*engine, 1, 100, &error) == Status::kRefused);
  CHECK(error == "put " + path_of(root, 1).string() + ": Is a directory");
  CHECK(get(*engine, 1, 100) == Status::kMiss);
  CHECK(fs::exists(path_of(root, 1) / "inside"));
  CHECK(ask(*engine, Op::kDelete, 1) == Status::kFault);
  CHECK(no_temporaries(root));
  // A file where the bucket belongs.
  fs::remove_all(path_of(root, 2).parent_path());
  std::ofstream(path_of(root, 2).parent_path()) << "x";
  CHECK(put(*engine, 2, 100, &error) == Status::kFault);
  CHECK(error.ends_with(": Not a directory"));
  CHECK(get(*engine, 2, 100, &error) == Status::kFault);
  CHECK(error.starts_with("get ") && error.ends_with(": Not a directory"));
  CHECK(no_temporaries(root));
}

TEST(the_least_recently_used_goes_first) {
  const Directory root;
  constexpr std::size_t kNbytes = 1000;
  const auto engine = open_engine(root.text(), 10 * kSmall, 1);
  for (unsigned i = 0; i < 10; ++i) CHECK(put(*engine, i, kNbytes) == Status::kOk);
  CHECK(get(*engine, 0, kNbytes) == Status::kOk);  // used again: no longer the oldest
  CHECK(get(*engine, 2, kNbytes) == Status::kOk);
  CHECK(counter(*engine, "evicted") == 0);
  CHECK(put(*engine, 10, kNbytes) == Status::kOk);  // to 90 % less one record: two must go
  CHECK(counter(*engine, "evicted") == 2 && counter(*engine, "evicted_nbytes") == 2 * kSmall);
  for (unsigned i = 0; i <= 10; ++i) {
    CHECK(ask(*engine, Op::kContains, i) == (i == 1 || i == 3 ? Status::kMiss : Status::kOk));
  }
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
}

TEST(too_large_for_the_store_is_no_room) {
  const Directory root;
  const auto engine = open_engine(root.text(), kSmall, 1);
  CHECK(put(*engine, 1, kSmall - 79) == Status::kNoRoom);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  CHECK(put(*engine, 2, 1000) == Status::kOk);
  CHECK(counter(*engine, "no_room") == 1 && counter(*engine, "evicted") == 1);
}

TEST(two_engines_share_a_directory_and_its_capacity) {
  const Directory root;
  constexpr std::uint64_t kCapacity = 8 * kMiB;
  constexpr unsigned kKeys = 200;
  std::vector<std::unique_ptr<IoExecutor>> engines;
  engines.push_back(open_engine(root.text(), kCapacity, 2));
  engines.push_back(open_engine(root.text(), kCapacity, 2));
  std::atomic<bool> stop{false};
  std::atomic<unsigned> hits{0};
  std::thread auditor([&] {
    // Walking is not atomic: a file that moves from blocks/ or tmp/ during the walk is seen twice at most per writer.
    while (!stop) CHECK(tree_nbytes(root) <= kCapacity + 8 * (300'000 + kSmall));
  });
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < 4; ++t) {
    workers.emplace_back([&, t] {
      std::mt19937 random(t);
      IoExecutor& engine = *engines[t % 2];
      for (int i = 0; i < 150; ++i) {
        const auto id = static_cast<unsigned>(random() % kKeys);
        const std::size_t n = 1000 + id * 1000;
        switch (random() % 5) {
          case 0:
          case 1:
            CHECK(put(engine, id, n) == Status::kOk);
            break;
          case 2: {
            const Status status = ask(engine, Op::kDelete, id);
            CHECK(status == Status::kOk || status == Status::kMiss);
            break;
          }
          default: {
            const Status status = get(engine, id, n);
            CHECK(status == Status::kOk || status == Status::kMiss);
            if (status == Status::kOk) ++hits;
          }
        }
        // What moves between two counts is in both for a moment.
        CHECK(counter(engine, "stored_nbytes") <= kCapacity + 4 * (300'000 + kSmall));
      }
    });
  }
  for (auto& worker : workers) worker.join();
  stop = true;
  auditor.join();
  CHECK(hits > 0);
  CHECK(counter(*engines[0], "evicted") + counter(*engines[1], "evicted") > 0);
  CHECK(counter(*engines[0], "damaged") + counter(*engines[1], "damaged") == 0);
  CHECK(counter(*engines[0], "faults") + counter(*engines[1], "faults") == 0);
  CHECK(tree_nbytes(root) <= kCapacity);
  CHECK(counter(*engines[0], "stored_nbytes") >= tree_nbytes(root));  // too high is safe, too low is not
  CHECK(no_temporaries(root));
  engines.clear();
  // A count whose lock a peer held for too long, on a busy machine, stays too high until it is counted anew.
  CHECK(counter(*open_engine(root.text(), kCapacity, 1), "stored_nbytes") >= tree_nbytes(root));
  fs::remove(fs::path(root.text()) / "usage");
  CHECK(eventually([&] {  // each opening counts for a tenth of a second
    return counter(*open_engine(root.text(), kCapacity, 1), "stored_nbytes") == tree_nbytes(root);
  }));
}

TEST(many_writers_of_one_key_leave_one_true_record) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 4);
  std::vector<std::thread> workers;
  for (int t = 0; t < 4; ++t) {
    workers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        CHECK(put(*engine, 7, 100'000) == Status::kOk);
        const Status status = get(*engine, 7, 100'000);
        CHECK(status == Status::kOk);
      }
    });
  }
  for (auto& worker : workers) worker.join();
  CHECK(counter(*engine, "damaged") == 0);
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
  CHECK(tree_nbytes(root) <= 5 * file_nbytes(100'000));  // with what each replaced last
}

TEST(cancel_at_random_leaves_nothing_behind) {
  const Directory root;
  const auto engine = open_engine(root.text(), 256 * kMiB, 2);
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    std::vector<Key> keys;
    std::vector<std::vector<std::byte>> buffers;
    for (unsigned k = 0; k < 8; ++k) {
      keys.push_back(key_of(k));
      buffers.push_back(payload_of(k, kMiB));
    }
    std::vector<Batch::Buffer> spans(buffers.begin(), buffers.end());
    const auto op = i % 2 == 0 ? Op::kPut : Op::kGet;
    const auto batch = engine->submit(op, std::move(keys), std::move(spans),
                                      i % 3 == 0 ? std::chrono::microseconds(random() % 5000 + 1) : 20s);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    batch->cancel();
    CHECK(batch->wait_until(Clock::now() + 20s));
    for (auto& buffer : buffers) std::fill(buffer.begin(), buffer.end(), std::byte{1});  // ours again
    for (const Status s : batch->results()) CHECK(s != Status::kFault && s != Status::kNoRoom);
    CHECK(no_temporaries(root));
  }
  for (unsigned k = 0; k < 8; ++k) CHECK(get(*engine, k, kMiB) != Status::kFault);
  CHECK(counter(*engine, "damaged") == 0);
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
}

TEST(a_large_item_stops_between_its_chunks) {
  const Directory root;
  constexpr std::size_t kNbytes = 64 * kMiB;
  const auto engine = open_engine(root.text(), 256 * kMiB, 1);
  CHECK(put(*engine, 1, kNbytes) == Status::kOk);
  std::vector<std::byte> buffer(kNbytes);
  for (const Op op : {Op::kGet, Op::kPut}) {
    // Started, then cancelled while it runs. It may have been quicker once, but not every time.
    const bool stopped = eventually([&] {
      const auto batch = engine->submit(op, {key_of(1)}, {buffer}, 20s);
      CHECK(eventually([&] { return counter(*engine, "queued") == 0; }));
      batch->cancel();
      CHECK(batch->wait_until(Clock::now() + 20s));
      return batch->results()[0] == Status::kCancelled;
    });
    CHECK(stopped);
  }
  CHECK(no_temporaries(root));
}

TEST(a_writer_holds_the_lock_of_its_temporary_file) {
  const Directory root;
  const auto engine = open_engine(root.text(), 256 * kMiB, 1);
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(32 * kMiB));
  const auto batch = engine->submit(Op::kPut, {key_of(1), key_of(2), key_of(3), key_of(4)},
                                    {buffers.begin(), buffers.end()}, 60s);
  int seen = 0;
  while (!batch->done()) {
    // Under the lock of a pass no writer is between creating its file and locking it.
    const Usage usage(root / "usage", std::nullopt);
    const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
    for (const auto& entry : fs::directory_iterator(root / "tmp")) {
      const Descriptor file(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
      CHECK(file && flock(file.get(), LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
      ++seen;
    }
  }
  CHECK(seen > 0);
  for (const Status s : batch->results()) CHECK(s == Status::kOk);
}

TEST(close_with_work_in_flight_leaves_no_temporaries) {
  const Directory root;
  for (int i = 0; i < 10; ++i) {
    const auto engine = open_engine(root.text(), 256 * kMiB, 3);
    std::vector<Key> keys;
    std::vector<std::vector<std::byte>> buffers;
    for (unsigned k = 0; k < 32; ++k) {
      keys.push_back(key_of(k));
      buffers.push_back(payload_of(k, kMiB));
    }
    std::vector<Batch::Buffer> spans(buffers.begin(), buffers.end());
    const auto batch = engine->submit(Op::kPut, std::move(keys), std::move(spans), 20s);
    std::this_thread::sleep_for(std::chrono::microseconds(500 * i));
    CHECK(engine->close(20s));
    CHECK(batch->done());
    CHECK(no_temporaries(root));
  }
}

TEST(the_directory_may_go_away) {
  const Directory parent;
  const std::string root = (parent / "deep/root").string();
  const auto engine = open_engine(root, 64 * kMiB, 2);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  for (const char* part : {"deep/root/blocks/001", "deep/root/tmp", "deep/root/free", "deep/root/blocks",
                           "deep/root/usage", "deep/root", "deep"}) {
    fs::remove_all(parent / part);
    const Status status = get(*engine, 1, 1000);
    CHECK(status == (fs::exists(parent / "deep/root/blocks/001") ? Status::kOk : Status::kMiss));
    CHECK(put(*engine, 1, 1000) == Status::kOk);
    CHECK(get(*engine, 1, 1000) == Status::kOk);
    // What others delete stays counted until the next pass, or until the counter itself goes.
    const bool counted_anew = std::string_view(part).ends_with("usage") ||
                              std::string_view(part).ends_with("root") || std::string_view(part) == "deep";
    CHECK(counted_anew ? counter(*engine, "stored_nbytes") == tree_nbytes(root)
                       : counter(*engine, "stored_nbytes") >= tree_nbytes(root));
  }
}

TEST(the_directory_goes_away_while_running) {
  const Directory parent;
  const std::string root = (parent / "root").string();
  const auto engine = open_engine(root, 64 * kMiB, 3);
  std::atomic<bool> stop{false};
  std::thread remover([&] {
    while (!stop) {
      std::error_code ignored;
      fs::remove_all(parent / "root", ignored);
      std::this_thread::sleep_for(3ms);
    }
  });
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < 3; ++t) {
    workers.emplace_back([&, t] {
      for (unsigned i = 0; i < 150; ++i) {
        const Status stored = put(*engine, t * 1000 + i, 10'000);
        CHECK(stored == Status::kOk || stored == Status::kFault);  // removed again and again: it may give up
        const Status got = get(*engine, t * 1000 + i, 10'000);
        CHECK(got == Status::kOk || got == Status::kMiss);
      }
    });
  }
  for (auto& worker : workers) worker.join();
  stop = true;
  remover.join();
  fs::remove_all(parent / "root");  // the last removal may have left a part, which is no pool
  CHECK(counter(*engine, "damaged") == 0);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  CHECK(get(*engine, 1, 1000) == Status::kOk);
}

TEST(the_counter_heals) {
  const Directory root;
  {
    CHECK(put(*open_engine(root.text(), 64 * kMiB, 1), 1, 1000) == Status::kOk);
  }
  for (const char* content :
       {"", "KVP", "garbage garbage garbage garbage garbage garbage garbage garbage garbage"}) {
    std::ofstream(root / "usage", std::ios::trunc) << content;
    const auto engine = open_engine(root.text(), 64 * kMiB, 1);
    CHECK(counter(*engine, "stored_nbytes") == kSmall);
  }
  fs::remove(root / "usage");
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  CHECK(counter(*engine, "stored_nbytes") == kSmall);
  // Too high by a reservation of the dead: the first put that finds no room counts again.
  Usage usage(root / "usage", std::nullopt);
  CHECK(usage.reserve(60 * kMiB, 64 * kMiB, Usage::Known::kAll));
  CHECK(put(*engine, 2, 10 * kMiB) == Status::kOk);
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
  CHECK(counter(*engine, "evicted") == 0);
}

TEST(temporaries_of_the_dead_are_swept_and_of_the_living_kept) {
  const Directory root;
  make_pool(root.text());
  std::ofstream(root / "tmp/1.2.3.4") << std::string(1000, 'x');
  std::ofstream(root / "tmp/5.6.7.8") << std::string(2000, 'x');
  std::ofstream(root / "tmp/1.2.3") << "x";
  std::ofstream(root / "tmp/1.2.3.4.txt") << "x";
  const Descriptor living(open((root / "tmp/5.6.7.8").c_str(), O_WRONLY | O_CLOEXEC));
  CHECK(flock(living.get(), LOCK_EX) == 0);
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  CHECK(!fs::exists(root / "tmp/1.2.3.4"));
  CHECK(fs::exists(root / "tmp/1.2.3") && fs::exists(root / "tmp/1.2.3.4.txt"));  // not of our pattern
  CHECK(fs::exists(root / "tmp/5.6.7.8"));
  CHECK(counter(*engine, "stored_nbytes") == 2000);
}

TEST(a_busy_pass_elsewhere_delays_a_put_to_its_deadline_and_a_get_not_at_all) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  const Usage usage(root / "usage", std::nullopt);
  {
    const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
    CHECK(get(*engine, 1, 1000) == Status::kOk);
    std::vector<std::vector<std::byte>> buffers = {payload_of(2, 1000)};
    CHECK(run(*engine, Op::kPut, {2}, buffers, 50ms)[0] == Status::kTimedOut);
  }
  CHECK(put(*engine, 2, 1000) == Status::kOk);
}

TEST(opening_says_what_is_in_the_way) {
  const Directory root;
  std::ofstream(root / "file") << "x";
  try {
    open_engine((root / "file").string(), kMiB, 1);
    CHECK(false);
  } catch (const fs::filesystem_error& error) {
    CHECK(error.code().value() == ENOTDIR);
  }
  make_pool((root / "pool").string());
  fs::create_directories(root / "pool/usage");
  CHECK(refusal((root / "pool").string()).starts_with("its usage is no file"));
}

TEST(damage_to_the_counts_at_any_moment_costs_a_recount_and_nothing_else) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 2);
  const std::vector<std::function<void()>> harms = {
      [&] { fs::resize_file(root / "usage", 0); },
      [&] { fs::resize_file(root / "usage", 1000); },
      [&] { fs::resize_file(root / "usage", 1 << 20); },
      [&] { std::ofstream(root / "usage", std::ios::trunc) << std::string(40'000, 'x'); },
      [&] { fs::remove(root / "usage"); },
      [&] {  // one count, to more than anything can hold
        std::fstream file(root / "usage", std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(24 + 8 * 5);
        file.write("\x12\x34\xff\xff\xff\xff\xff\x7f", 8);
      },
  };
  unsigned next = 0;
  for (int round = 0; round < 3; ++round) {
    for (const auto& harm : harms) {
      for (unsigned i = 0; i < 20; ++i) CHECK(put(*engine, next++, 1000) == Status::kOk);
      harm();
      CHECK(get(*engine, next - 1, 1000) == Status::kOk);
      CHECK(eventually([&] {  // each put counts some milliseconds long
        CHECK(put(*engine, next, 1000) == Status::kOk);
        return counter(*engine, "stored_nbytes") == tree_nbytes(root);
      }));
      ++next;
    }
  }
  std::atomic<bool> stop{false};
  std::thread harmer([&] {
    while (!stop) {
      CHECK(truncate((root / "usage").c_str(), 0) == 0 || errno == ENOENT);
      std::this_thread::sleep_for(1ms);
    }
  });
  for (unsigned i = 0; i < 300; ++i) CHECK(put(*engine, next++, 1000) == Status::kOk);
  stop = true;
  harmer.join();
  CHECK(counter(*engine, "evicted") == 0 && counter(*engine, "faults") == 0);
}

TEST(eviction_gets_somewhere_however_short_its_time) {
  const Directory root;
  constexpr unsigned kRecords = 5000;
  constexpr std::size_t kNbytes = 100;
  const auto engine = open_engine(root.text(), kRecords * kSmall, 1);
  for (unsigned i = 0; i < kRecords; ++i) CHECK(put(*engine, i, kNbytes) == Status::kOk);
  CHECK(counter(*engine, "evicted") == 0);
  Usage usage(root / "usage", std::nullopt);
  FreeFiles free(root.text());
  const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
  // It is out of time before it begins, each time.
  const std::uint64_t capacity_nbytes = tree_nbytes(root);
  for (int pass = 0; pass < 10; ++pass) {
    const Evicted evicted =
        make_room(root.text(), usage, free, capacity_nbytes / 2, capacity_nbytes, [] { return true; });
    CHECK(evicted.records > 0);
  }
  CHECK(usage.read().sum().nbytes == tree_nbytes(root));
}

TEST(an_eviction_looks_at_a_part_of_a_large_store) {
  const Directory root;
  make_pool(root.text());
  constexpr unsigned kRecords = 20'000;
  for (unsigned i = 0; i < kRecords; ++i) {
    fs::create_directory(path_of(root, i).parent_path());
    std::ofstream(path_of(root, i)) << "record";
  }
  Usage usage(root / "usage", 0600);
  FreeFiles free(root.text());
  const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
  count(root.text(), usage, free, Clock::now() + 20s);
  CHECK(usage.read().sum().nbytes == 6 * kRecords && usage.read().sum().unknown == 0);
  // Nothing but what it looks at is read: the other buckets may as well be closed to it.
  const Evicted evicted = make_room(root.text(), usage, free, 6, 6 * kRecords, [] { return false; });
  CHECK(evicted.records >= 100 && evicted.records <= 120);
  CHECK(usage.read().cursor % kBuckets <= 300);
  CHECK(usage.read().sum().nbytes == tree_nbytes(root));
}

TEST(counting_goes_on_where_it_stopped) {
  const Directory root;
  make_pool(root.text());
  constexpr unsigned kRecords = 2000;
  for (unsigned i = 0; i < kRecords; ++i) {
    fs::create_directory(path_of(root, i).parent_path());
    std::ofstream(path_of(root, i)) << "record";
  }
  Usage usage(root / "usage", 0600);
  FreeFiles free(root.text());
  const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
  unsigned unknown = kCounts;
  int calls = 0;
  while (unknown != 0) {
    count(root.text(), usage, free, Clock::now());  // no time at all
    const auto sum = usage.read().sum();
    CHECK(sum.unknown < unknown);
    // A guess by what has been counted is near enough to keep a capacity by.
    CHECK(sum.nbytes > 4 * kRecords && sum.nbytes <= 8 * kRecords);
    unknown = sum.unknown;
    ++calls;
  }
  CHECK(calls > 10);
  CHECK(usage.read().sum().nbytes == 6 * kRecords);
}

TEST(a_touch_counts_as_a_use) {
  const Directory root;
  constexpr std::size_t kNbytes = 1000;
  const auto engine = open_engine(root.text(), 10 * kSmall, 1);
  for (unsigned i = 0; i < 10; ++i) CHECK(put(*engine, i, kNbytes) == Status::kOk);
  CHECK(ask(*engine, Op::kTouch, 0) == Status::kOk);
  CHECK(ask(*engine, Op::kContains, 1) == Status::kOk);
  CHECK(ask(*engine, Op::kTouch, 99) == Status::kMiss);
  CHECK(put(*engine, 10, kNbytes) == Status::kOk);
  CHECK(ask(*engine, Op::kContains, 0) == Status::kOk);
  CHECK(ask(*engine, Op::kContains, 1) == Status::kMiss);
}

TEST(of_what_is_used_together_the_first_stays_longest) {
  constexpr std::size_t kNbytes = 1000;
  const std::vector<unsigned> ids = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
  std::vector<std::vector<std::byte>> buffers, none;
  for (const unsigned i : ids) buffers.push_back(payload_of(i, kNbytes));
  for (const std::optional<Op> then :
       {std::optional<Op>(), std::optional(Op::kTouch), std::optional(Op::kGet)}) {
    const Directory root;
    const auto engine = open_engine(root.text(), 10 * kSmall, 1);
    if (then) {
      for (unsigned i = 0; i < 10; ++i) CHECK(put(*engine, 9 - i, kNbytes) == Status::kOk);
      run(*engine, *then, ids, *then == Op::kGet ? buffers : none);
    } else {
      run(*engine, Op::kPut, ids, buffers);
    }
    CHECK(put(*engine, 10, kNbytes) == Status::kOk);  // evicts two
    for (unsigned i = 0; i < 10; ++i)
      CHECK(ask(*engine, Op::kContains, i) == (i < 2 ? Status::kMiss : Status::kOk));
  }
}

TEST(a_put_if_absent_writes_what_is_missing_and_counts_the_rest_as_used) {
  const Directory root;
  constexpr std::size_t kNbytes = 1000;
  const auto engine = open_engine(root.text(), 10 * kSmall, 1);
  for (unsigned i = 0; i < 10; ++i) CHECK(put(*engine, i, kNbytes) == Status::kOk);
  // Of another number than its key's, so that get() tells who wrote the record.
  std::vector<std::vector<std::byte>> others = {payload_of(90, kNbytes), payload_of(10, kNbytes)};
  const auto results = run(*engine, Op::kPutAbsent, {0, 10}, others);
  CHECK(results[0] == Status::kPresent && results[1] == Status::kOk);
  CHECK(ask(*engine, Op::kContains, 0) == Status::kOk);
  CHECK(ask(*engine, Op::kContains, 1) == Status::kMiss);
  CHECK(get(*engine, 0, kNbytes) == Status::kOk && get(*engine, 10, kNbytes) == Status::kOk);
  CHECK(counter(*engine, "present_puts") == 1 && counter(*engine, "puts") == 11);
}

TEST(a_clock_that_was_set_back_keeps_nothing_for_ever) {
  const Directory root;
  constexpr std::size_t kNbytes = 1000;
  const auto engine = open_engine(root.text(), 10 * kSmall, 1);
  for (unsigned i = 0; i < 10; ++i) {
    CHECK(put(*engine, i, kNbytes) == Status::kOk);
    fs::last_write_time(path_of(root, i), fs::file_time_type::clock::now() + std::chrono::hours(24 * 365));
  }
  for (unsigned i = 10; i < 40; ++i) {
    CHECK(put(*engine, i, kNbytes) == Status::kOk);
    CHECK(get(*engine, i, kNbytes) == Status::kOk);
  }
  for (unsigned i = 0; i < 10; ++i) CHECK(ask(*engine, Op::kContains, i) == Status::kMiss);
}

TEST(only_our_own_names_are_counted_and_evicted) {
  const Directory root;
  const auto engine = open_engine(root.text(), 4 * kSmall, 1);
  CHECK(put(*engine, 1, 1000) == Status::kOk);
  const fs::path bucket = path_of(root, 1).parent_path();
  std::ofstream(bucket / "thesis.txt") << std::string(5000, 'x');
  std::ofstream(bucket / ("t." + kNamespace + "." + hash_text(2) + ".0.0")) << std::string(5000, 'x');
  fs::create_directory(root / "elsewhere");
  std::ofstream(root / "elsewhere/thesis.txt") << "x";
  fs::create_directory_symlink(root / "elsewhere", root / "blocks/fff");
  fs::resize_file(root / "usage", 0);
  for (unsigned i = 0x10; i < 0x30; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(counter(*engine, "evicted") > 0);
  CHECK(fs::exists(bucket / "thesis.txt") && fs::exists(root / "elsewhere/thesis.txt"));
  CHECK(fs::exists(bucket / ("t." + kNamespace + "." + hash_text(2) + ".0.0")));
}

TEST(a_put_overwrites_an_evicted_file_of_its_size) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  const auto inode = [&](unsigned i) {
    struct stat info{};
    CHECK(lstat(path_of(root, i).c_str(), &info) == 0);
    return info.st_ino;
  };
  std::vector<ino_t> inodes;
  for (unsigned i = 0; i < 20; ++i) {
    CHECK(put(*engine, i, 1000) == Status::kOk);
    inodes.push_back(inode(i));
  }
  // Of another length in as many blocks, and of one in more, for which evicted files are deleted.
  for (unsigned i = 20; i < 50; ++i) {
    CHECK(put(*engine, i, 3000) == Status::kOk);
    CHECK(std::ranges::find(inodes, inode(i)) != inodes.end());
    CHECK(get(*engine, i, 3000) == Status::kOk);
    CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root) && tree_nbytes(root) <= 20 * kSmall);
  }
  for (unsigned i = 50; i < 60; ++i) {
    CHECK(put(*engine, i, 5000) == Status::kOk);
    CHECK(get(*engine, i, 5000) == Status::kOk);
    CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root) && tree_nbytes(root) <= 20 * kSmall);
  }
  CHECK(counter(*engine, "damaged") == 0 && no_temporaries(root));
  // What is deleted leaves nothing of what was evicted before.
  CHECK(ask(*engine, Op::kDelete, 59) == Status::kOk);
  CHECK(fs::is_empty(root / "free"));
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
}

TEST(what_is_overwritten_while_it_is_read_is_a_miss_and_no_damage) {
  const Directory root("/dev/shm");  // a disk reads megabytes at a time, hardly ever met in the middle
  constexpr std::size_t kNbytes = 2 * kMiB;
  const auto engine = open_engine(root.text(), 8 * file_nbytes(kNbytes), 4);
  for (unsigned i = 0; i < 3; ++i) CHECK(put(*engine, i, kNbytes) == Status::kOk);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;  // each puts its record into the file that another one left
  for (unsigned i = 0; i < 3; ++i) {
    writers.emplace_back([&, i] {
      std::vector<std::vector<std::byte>> buffers = {payload_of(i, kNbytes)};
      while (!stop) CHECK(run(*engine, Op::kPut, {i}, buffers)[0] == Status::kOk);
    });
  }
#if defined(__SANITIZE_THREAD__)  // follows each byte
  constexpr unsigned kReads = 40;
#else
  constexpr unsigned kReads = 400;
#endif
  std::vector<std::vector<std::byte>> buffers(1, std::vector<std::byte>(kNbytes));
  for (unsigned i = 0; i < kReads; ++i) {
    const Status status = run(*engine, Op::kGet, {i % 3}, buffers)[0];
    CHECK(status == Status::kMiss || (status == Status::kOk && buffers[0] == payload_of(i % 3, kNbytes)));
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  for (unsigned i = 0; i < 3; ++i) CHECK(get(*engine, i, kNbytes) == Status::kOk);
  CHECK(counter(*engine, "damaged") == 0);
}

TEST(an_evicted_file_counts_and_is_locked_while_it_is_overwritten) {
  const Directory root;
  constexpr std::size_t kNbytes = 32 * kMiB;
  const auto engine = open_engine(root.text(), 3 * file_nbytes(kNbytes), 1);
  std::vector<std::vector<std::byte>> buffers(8, std::vector<std::byte>(kNbytes));
  std::vector<Key> keys;
  for (unsigned i = 0; i < buffers.size(); ++i) keys.push_back(key_of(i));
  const auto batch = engine->submit(Op::kPut, std::move(keys), {buffers.begin(), buffers.end()}, 60s);
  int seen = 0;
  while (!batch->done()) {
    const Usage usage(root / "usage", std::nullopt);
    const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
    CHECK(usage.read().sum().nbytes >= tree_nbytes(root));
    for (const auto& entry : fs::directory_iterator(root / "tmp")) {
      const Descriptor file(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
      CHECK(file && flock(file.get(), LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
      ++seen;
    }
  }
  CHECK(seen > 0 && counter(*engine, "evicted") > 0);
  for (const Status s : batch->results()) CHECK(s == Status::kOk);
}

TEST(an_evicted_file_that_others_changed_is_not_overwritten) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 0; i < 21; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(!fs::is_empty(root / "free"));
  std::ofstream(root / "elsewhere") << std::string(file_size(1000), 'x');
  for (const auto& entry : fs::directory_iterator(root / "free")) {
    fs::remove(entry.path());
    fs::create_hard_link(root / "elsewhere", entry.path());
  }
  std::ofstream(root / "free/not.ours") << "x";
  for (unsigned i = 21; i < 40; ++i) {
    CHECK(put(*engine, i, 1000) == Status::kOk);
    CHECK(counter(*engine, "stored_nbytes") + 1 == tree_nbytes(root) && no_temporaries(root));  // not.ours
  }
  std::string text(1, '\0');
  std::ifstream(root / "elsewhere").read(text.data(), 1);
  CHECK(text == "x" && fs::exists(root / "free/not.ours"));
  CHECK(counter(*engine, "stored_nbytes") == 20 * kSmall);
  // One that its thread knows has become a link.
  std::ofstream(root / "linked") << std::string(file_size(1000), 'x');
  for (unsigned i = 40; i < 44; ++i) {
    for (const auto& entry : fs::directory_iterator(root / "free")) {
      fs::remove(entry.path());
      fs::create_symlink(root / "linked", entry.path());
    }
    CHECK(put(*engine, i, 1000) == Status::kOk && get(*engine, i, 1000) == Status::kOk);
  }
  std::ifstream(root / "linked").read(text.data(), 1);
  CHECK(text == "x" && fs::file_size(root / "linked") == file_size(1000));
}

TEST(a_record_that_power_loss_tore_or_exchanged_is_a_miss_and_goes) {
  const Directory root;
  const auto engine = open_engine(root.text(), 64 * kMiB, 1);
  constexpr std::size_t kNbytes = 100'000;
  const auto write = [&](unsigned i, std::size_t at, const std::string& bytes) {
    std::fstream file(path_of(root, i), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  };
  const std::vector<std::function<void(unsigned)>> losses = {
      // The name stayed, and its file was overwritten for another record: whole, or in part.
      [&](unsigned i) {
        fs::copy_file(path_of(root, 90), path_of(root, i), fs::copy_options::overwrite_existing);
      },
      [&](unsigned i) { write(i, 0, std::string(kSmall, 'x')); },
      // Blocks that never reached the disk: the first, one in between, the last.
      [&](unsigned i) { write(i, 0, std::string(kSmall, '\0')); },
      [&](unsigned i) { write(i, 5 * kSmall, std::string(kSmall, '\0')); },
      [&](unsigned i) { write(i, file_nbytes(kNbytes) - kSmall, std::string(kSmall, '\0')); },
      [&](unsigned i) { fs::resize_file(path_of(root, i), 0); },
  };
  CHECK(put(*engine, 90, kNbytes) == Status::kOk);
  for (unsigned i = 0; i < losses.size(); ++i) {
    CHECK(put(*engine, i, kNbytes) == Status::kOk);
    losses[i](i);
    CHECK(get(*engine, i, kNbytes) == Status::kMiss);
    CHECK(!fs::exists(path_of(root, i)) && counter(*engine, "damaged") == i + 1);
    CHECK(put(*engine, i, kNbytes) == Status::kOk && get(*engine, i, kNbytes) == Status::kOk);
  }
}

TEST(records_are_read_and_written_wherever_they_lie_in_memory) {
  for (const fs::path& parent : {fs::path("/dev/shm"), fs::temp_directory_path()}) {
    const Directory root(parent);
    const auto engine = open_engine(root.text(), 64 * kMiB, 1);
    unsigned i = 0;
    for (const std::size_t n : {std::size_t{1}, std::size_t{4015}, std::size_t{4016}, std::size_t{4017},
                                std::size_t{4096}, std::size_t{2 * kMiB}, std::size_t{5 * kMiB + 513}}) {
      for (const std::size_t shift : {0, 512, 64, 1}) {
        std::vector<std::byte> memory(n + 2 * 4096);
        const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
        const std::span<std::byte> place(memory.data() + (4096 - address % 4096) + shift, n);
        const auto wanted = payload_of(++i, n);
        std::ranges::copy(wanted, place.begin());
        const auto put = engine->submit(Op::kPut, {key_of(i)}, {place}, 20s);
        CHECK(put->wait_until(Clock::now() + 20s) && put->results()[0] == Status::kOk);
        std::ranges::fill(place, std::byte{1});
        const auto got = engine->submit(Op::kGet, {key_of(i)}, {place}, 20s);
        CHECK(got->wait_until(Clock::now() + 20s) && got->results()[0] == Status::kOk);
        CHECK(std::ranges::equal(place, wanted) && memory.back() == std::byte{0});
        CHECK(got->found(0).nbytes == n);
        const auto asked = engine->submit(Op::kContains, {key_of(i)}, {}, 20s);
        CHECK(asked->wait_until(Clock::now() + 20s) && asked->found(0).nbytes == n);
        CHECK(ask(*engine, Op::kDelete, i) == Status::kOk);
      }
    }
    CHECK(engine->close(10s));
  }
}

TEST(what_is_above_a_lowered_capacity_is_deleted_at_once) {
  const Directory root;
  constexpr unsigned kRecords = 3000;
  const auto engine = open_engine(root.text(), kRecords * kSmall, 1);
  for (unsigned i = 0; i < kRecords; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  Usage usage(root / "usage", std::nullopt);
  FreeFiles free(root.text());
  {
    const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
    make_room(root.text(), usage, free, 0, kMiB, [] { return false; });
    CHECK(fs::is_empty(root /
                       "free"));  // to list it, and to delete from it, would hold the lock from all others
    CHECK(usage.read().sum().nbytes == tree_nbytes(root) && tree_nbytes(root) <= kMiB);
    make_room(root.text(), usage, free, kSmall, tree_nbytes(root), [] { return false; });
    CHECK(!fs::is_empty(root / "free"));
    CHECK(usage.read().sum().nbytes == tree_nbytes(root));
  }
}

TEST(a_lowered_capacity_holds_for_puts_that_overwrite) {
  const Directory root;
  const auto engine = open_engine(root.text(), 2 * kMiB, 1);
  for (unsigned i = 0; i < 513; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(!fs::is_empty(root / "free"));
  CHECK(write_capacity(root.text(), 0600, kMiB) == 0);
  CHECK(eventually([&] {  // followed within a second
    CHECK(put(*engine, 1000, 1000) == Status::kOk);
    return tree_nbytes(root) <= kMiB;
  }));
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
}

TEST(evicted_files_count_as_what_they_are) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 0; i < 21; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  std::ofstream(root / "free/4096.1");  // cut, as by a power loss
  fs::resize_file(root / "free/4096.1", 5 * kSmall);
  std::ofstream(root / "free/18446744073709551615.2") << std::string(100, 'x');
  std::uint64_t held_nbytes = 0;
  for (const auto& entry : fs::directory_iterator(root / "free")) {
    struct stat info{};
    CHECK(lstat(entry.path().c_str(), &info) == 0);
    held_nbytes += file_nbytes(info);
  }
  CHECK(FreeFiles(root.text()).remove(0) == held_nbytes);
  for (unsigned i = 21; i < 60; ++i) {
    CHECK(put(*engine, i, i % 2 == 0 ? 1000 : 5000) == Status::kOk);
    CHECK(get(*engine, i, i % 2 == 0 ? 1000 : 5000) == Status::kOk);
  }
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root) && tree_nbytes(root) <= 20 * kSmall);
}

TEST(a_deletion_deletes_what_was_evicted_though_the_counts_were_replaced) {
  const Directory root;
  const auto other = open_engine(root.text(), 20 * kSmall, 1);
  CHECK(put(*other, 0, 1000) == Status::kOk);
  fs::remove(root / "usage");
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 1; i < 30; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(!fs::is_empty(root / "free"));
  CHECK(ask(*other, Op::kDelete, 29) == Status::kOk);
  CHECK(fs::is_empty(root / "free"));
  CHECK(counter(*engine, "stored_nbytes") == tree_nbytes(root));
}

TEST(a_deletion_waits_for_a_pass_to_delete_what_was_evicted) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 0; i < 21; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(!fs::is_empty(root / "free"));
  std::atomic<bool> holds{false};
  std::thread pass([&] {
    const Usage usage(root / "usage", std::nullopt);
    const auto held = usage.lock(Usage::Hold::kExclusive, [] { return false; });
    holds = true;
    std::this_thread::sleep_for(200ms);
  });
  CHECK(eventually([&] { return holds.load(); }));
  CHECK(ask(*engine, Op::kDelete, 20) == Status::kOk);
  pass.join();
  CHECK(fs::is_empty(root / "free"));
}

TEST(a_removed_folder_of_evicted_files_is_made_again) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 0; i < 25; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  fs::remove_all(root / "free");
  for (unsigned i = 25; i < 60; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(fs::exists(root / "free") && tree_nbytes(root) <= 20 * kSmall);
}

TEST(less_is_asked_of_memory_first_and_then_of_the_file_system) {
  const Directory root;
  Direct direct("/proc");
  const Descriptor file(open((root / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  alignas(4096) std::byte page[4096];
  CHECK(!direct.asks_less(file.get(), page) && direct.on());  // nothing was asked of the plain file
  direct.apply(file.get());
  if ((fcntl(file.get(), F_GETFL) & O_DIRECT) == 0) return;  // a file system without
  CHECK(direct.may(page + 512));
  // Threads that asked at the same time.
  CHECK(direct.asks_less(file.get(), page + 512) && direct.asks_less(file.get(), page + 512));
  CHECK(direct.on() && direct.may(page) && !direct.may(page + 512));
  CHECK(direct.asks_less(file.get(), page) && !direct.on());
  CHECK(direct.asks_less(file.get(), page) && direct.asks_less(file.get(), page + 512));
}

TEST(a_file_that_came_back_within_a_tick_is_not_as_opened) {
  const Directory root;
  const std::string path = (root / "file").string();
  std::ofstream(path) << "x";
  struct stat opened{};
  CHECK(stat(path.c_str(), &opened) == 0 && is_as_opened(path, opened));
  struct stat before = opened;
  before.st_mtim.tv_nsec ^= 1;  // the time of its use is exact where the kernel's is the same
  CHECK(!is_as_opened(path, before));
  before = opened;
  before.st_ctim.tv_nsec ^= 1;
  CHECK(!is_as_opened(path, before));
  fs::rename(path, root / "elsewhere");
  CHECK(!is_as_opened(path, opened));
  std::ofstream(path) << "x";
  CHECK(!is_as_opened(path, opened));
}

TEST(evicted_files_that_cannot_be_deleted_stop_no_puts) {
  const Directory root;
  const auto engine = open_engine(root.text(), 20 * kSmall, 1);
  for (unsigned i = 0; i < 21; ++i) CHECK(put(*engine, i, 1000) == Status::kOk);
  CHECK(!fs::is_empty(root / "free"));
  const Descriptor folder(open((root / "free").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  int usual = 0;
  CHECK(ioctl(folder.get(), FS_IOC_GETFLAGS, &usual) == 0 || geteuid() != 0);
  const int immutable = usual | FS_IMMUTABLE_FL;
  // As for another user's in a directory with the sticky bit.
  if (geteuid() != 0) fs::permissions(root / "free", fs::perms::owner_read | fs::perms::owner_exec);
  if (geteuid() == 0 && ioctl(folder.get(), FS_IOC_SETFLAGS, &immutable) != 0)
    return;  // not on this file system
  std::vector<Status> stored;
  for (unsigned i = 21; i < 60; ++i) stored.push_back(put(*engine, i, i % 2 == 0 ? 1000 : 5000));
  const std::uint64_t held_nbytes = tree_nbytes(root);
  if (geteuid() != 0) fs::permissions(root / "free", fs::perms::owner_all);
  CHECK(geteuid() != 0 || ioctl(folder.get(), FS_IOC_SETFLAGS, &usual) == 0);
  for (const Status s : stored) CHECK(s == Status::kOk);
  CHECK(held_nbytes <= 20 * kSmall);
}

TEST(finding_a_pool_writes_nothing) {
  const Directory root;
  CHECK(refusal((root / "none").string(), std::nullopt).starts_with("there is no such directory"));
  CHECK(!fs::exists(root / "none"));
  CHECK(refusal(root.text(), std::nullopt).starts_with("it is empty and no pool yet"));
  CHECK(fs::is_empty(root.text()));
  {
    CHECK(put(*open_engine(root.text(), 64 * kMiB, 1), 1, 1000) == Status::kOk);
  }
  std::ofstream(root / "tmp/1.2.3.4") << "x";
  fs::remove(root / "usage");
  {
    IoExecutor engine(std::make_unique<FileBackend>(root.text(), std::nullopt), 1);
    CHECK(ask(engine, Op::kContains, 1) == Status::kOk);
    CHECK(fs::exists(root / "tmp/1.2.3.4") && !fs::exists(root / "usage"));
    CHECK(ask(engine, Op::kDelete, 1) == Status::kOk);
    CHECK(!fs::exists(root / "usage"));
  }
}

}  // namespace kvpool
