// The file backend: the shared state of its I/O threads, and its counters.
#include "store/file.h"

#include <filesystem>

#include "store/file_io_thread.h"

namespace kvpool {

FileBackend::FileBackend(const std::string& root, std::uint64_t capacity_nbytes, Open how)
    : root_(std::filesystem::absolute(root).lexically_normal()), capacity_nbytes_(capacity_nbytes) {
  while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
  pool_ = how == Open::kMake ? make_pool(root_) : find_pool(root_);
  if (how == Open::kMake) FileIoThread(*this, 0).settle();
}

std::unique_ptr<IoThread> FileBackend::make_io_thread(unsigned index) {
  return std::make_unique<FileIoThread>(*this, index);
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
