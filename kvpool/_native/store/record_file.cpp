// Layout, O_DIRECT, and the steps of a read and a write. See record_file.h.
#include "store/record_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvpool {
namespace {

constexpr std::size_t kDirectStep = std::size_t{4} << 20;  // of a payload that lies where O_DIRECT takes it
constexpr std::size_t kBetweenNbytes = std::size_t{1} << 20;  // of others

std::uint64_t padding_of(std::uint64_t payload_nbytes) {
  return (kFileBlock - (payload_nbytes + kRecordHeaderNbytes) % kFileBlock) % kFileBlock;
}

bool is_same(const timespec& a, const timespec& b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

template <typename Call>
ssize_t retry(Call call) {
  for (;;) {
    const ssize_t n = call();
    if (n >= 0 || errno != EINTR) return n;
  }
}

// Calls move(parts, count, offset) until both parts are through; what is left of them is told by `done`.
template <typename Move>
RecordFile::End move_all(std::span<std::byte> first, std::span<std::byte> second, off_t at, Move move) {
  std::size_t done = 0;
  while (done < first.size() + second.size()) {
    iovec parts[2];
    int count = 0;
    if (done < first.size()) parts[count++] = {first.data() + done, first.size() - done};
    const std::size_t behind = done < first.size() ? 0 : done - first.size();
    if (behind < second.size()) parts[count++] = {second.data() + behind, second.size() - behind};
    const ssize_t n = retry([&] { return move(parts, count, at + static_cast<off_t>(done)); });
    if (n < 0) return RecordFile::End::kError;
    if (n == 0) return RecordFile::End::kCut;
    done += static_cast<std::size_t>(n);
  }
  return RecordFile::End::kWhole;
}

void update(RecordChecksum& checksum, std::span<const std::byte> bytes) {
  for (std::size_t at = 0; at < bytes.size(); at += kChunkNbytes)
    checksum.update(bytes.subspan(at, std::min(kChunkNbytes, bytes.size() - at)));
}

}  // namespace

std::uint64_t file_nbytes(const struct stat& info) {
  const auto size = static_cast<std::uint64_t>(info.st_size);
  return size - (size < kFileBlock ? 0 : size % kFileBlock);
}

std::uint64_t file_nbytes(std::uint64_t payload_nbytes) {
  return payload_nbytes + kRecordHeaderNbytes + padding_of(payload_nbytes);
}

std::uint64_t file_size(std::uint64_t payload_nbytes) {
  return file_nbytes(payload_nbytes) + padding_of(payload_nbytes);
}

std::optional<std::uint64_t> payload_nbytes(const struct stat& info) {
  const auto size = static_cast<std::uint64_t>(info.st_size);
  const std::uint64_t padding = size % kFileBlock;
  const std::uint64_t blocks = size - padding;
  if (blocks < padding + kRecordHeaderNbytes + 1) return std::nullopt;
  return blocks - padding - kRecordHeaderNbytes;
}

bool is_as_opened(const std::string& path, const struct stat& opened) {
  struct stat now;
  return lstat(path.c_str(), &now) == 0 && now.st_dev == opened.st_dev && now.st_ino == opened.st_ino &&
         is_same(now.st_ctim, opened.st_ctim) && is_same(now.st_mtim, opened.st_mtim);
}

Direct::Direct(const std::string& root) {
  struct statfs info{};
  const bool is_memory = statfs(root.c_str(), &info) != 0 || info.f_type == TMPFS_MAGIC ||
                         info.f_type == RAMFS_MAGIC || info.f_type == HUGETLBFS_MAGIC;
  on_.store(!is_memory);
}

void Direct::apply(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (on() && flags >= 0 && fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) on_.store(false);
}

bool Direct::asks_less(int fd, const std::byte* memory) {
  // By what this call asked for: another thread may have changed what the next ones ask for.
  if ((fcntl(fd, F_GETFL) & O_DIRECT) == 0) return false;
  if (reinterpret_cast<std::uintptr_t>(memory) % kFileBlock != 0) {
    memory_alignment_.store(kFileBlock);
  } else {
    on_.store(false);
  }
  return true;
}

RecordFile::Step RecordFile::step_at(const std::byte* payload, std::size_t whole, std::size_t begin) {
  const std::size_t rest = whole - begin;
  if (!direct_.on()) return {std::min(rest, kChunkNbytes), nullptr};
  if (direct_.may(payload)) return {std::min(rest, kDirectStep), nullptr};
  if (!between_) between_ = make_aligned_bytes(kBetweenNbytes);
  return {std::min(rest, kBetweenNbytes), between_.get()};
}

RecordFile::End RecordFile::write(int fd, std::span<const std::byte> payload, bool hashes,
                                  const std::function<RecordHeader(RecordChecksum&)>& seal,
                                  const GiveUp& give_up) {
  RecordChecksum checksum;
  const std::size_t whole = payload.size() - payload.size() % kFileBlock;
  for (std::size_t begin = 0;;) {
    if (give_up()) return End::kGivenUp;
    const Step step = step_at(payload.data(), whole, begin);
    const auto part = payload.subspan(begin, step.nbytes);
    if (step.memory != nullptr) std::memcpy(step.memory, part.data(), part.size());
    if (hashes) update(checksum, part);
    std::span<std::byte> tail;
    if (begin + part.size() == whole) {
      const auto rest = payload.subspan(whole);
      if (hashes) update(checksum, rest);
      const RecordHeader header = seal(checksum);
      tail = {tail_.get(), static_cast<std::size_t>(file_nbytes(payload.size()) - whole)};
      std::ranges::copy(rest, tail.begin());
      std::ranges::fill(tail.subspan(rest.size()), std::byte{0});
      std::memcpy(tail.data() + tail.size() - sizeof header, &header, sizeof header);
    }
    // The system's vectors have no const.
    auto* const memory = step.memory != nullptr ? step.memory : const_cast<std::byte*>(part.data());
    memory_ = memory;
    const End end =
        move_all({memory, part.size()}, tail, static_cast<off_t>(begin),
                 [fd](const iovec* parts, int count, off_t at) { return pwritev(fd, parts, count, at); });
    if (end != End::kWhole || !tail.empty()) return end;
    begin += part.size();
  }
}

RecordFile::End RecordFile::read(int fd, std::span<std::byte> payload, RecordHeader& header,
                                 RecordChecksum& checksum, const GiveUp& give_up) {
  const std::size_t whole = payload.size() - payload.size() % kFileBlock;
  for (std::size_t begin = 0;;) {
    if (give_up()) return End::kGivenUp;
    const Step step = step_at(payload.data(), whole, begin);
    const auto part = payload.subspan(begin, step.nbytes);
    const std::size_t tail_nbytes =
        begin + part.size() == whole ? static_cast<std::size_t>(file_nbytes(payload.size()) - whole) : 0;
    const std::span<std::byte> tail(tail_.get(), tail_nbytes);
    std::byte* const memory = step.memory != nullptr ? step.memory : part.data();
    memory_ = memory;
    const End end =
        move_all({memory, part.size()}, tail, static_cast<off_t>(begin),
                 [fd](const iovec* parts, int count, off_t at) { return preadv(fd, parts, count, at); });
    if (end != End::kWhole) return end;
    if (step.memory != nullptr) std::memcpy(part.data(), step.memory, part.size());
    update(checksum, part);
    if (!tail.empty()) {
      const auto rest = payload.subspan(whole);
      std::ranges::copy(tail.first(rest.size()), rest.begin());
      update(checksum, rest);
      std::memcpy(&header, tail.data() + tail.size() - sizeof header, sizeof header);
      return End::kWhole;
    }
    begin += part.size();
  }
}

}  // namespace kvpool
