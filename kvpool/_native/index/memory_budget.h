// Memory of several tables together, and of each. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace kvpool {

struct MemoryBudget {
  explicit MemoryBudget(std::size_t limit) : limit_nbytes(limit) {}

  const std::size_t limit_nbytes;
  std::atomic<std::size_t> used_nbytes{0};
};

// One table's part. Its owner has a lock.
class BudgetShare {
 public:
  // Every table may have this much, so that a late table works beside full ones.
  static constexpr std::size_t kFloorNbytes = std::size_t{1} << 20;

  explicit BudgetShare(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  ~BudgetShare() { set(0); }
  BudgetShare(const BudgetShare&) = delete;
  BudgetShare& operator=(const BudgetShare&) = delete;

  void set(std::size_t nbytes) {
    if (budget_) budget_->used_nbytes += nbytes - nbytes_;  // modulo 2**64
    nbytes_ = nbytes;
  }
  bool may_grow() const {
    return !budget_ || nbytes_ < kFloorNbytes || budget_->used_nbytes < budget_->limit_nbytes;
  }

 private:
  std::shared_ptr<MemoryBudget> budget_;
  std::size_t nbytes_ = 0;
};

}  // namespace kvpool
