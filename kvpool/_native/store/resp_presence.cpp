// Keys that share a command, and times to live: part of RespConnection, see resp_connection.h.
#include <utility>
#include <vector>

#include "store/resp_connection.h"

namespace kvpool {
namespace {

using Kind = RespRequest::Kind;

}  // namespace

void RespConnection::end_joined(Request& answered, std::size_t present) {
  if (present != 0 && present != answered.keys) return ask_each(answered, Kind::kContains);
  const Status status = present == 0 ? Status::kMiss : Status::kOk;
  std::vector<std::unique_ptr<Request>> looks;
  for (Item& item : std::exchange(answered.joined, {})) {
    if (status == Status::kOk) {
      if (auto look = look_at(item, answered.kind)) looks.push_back(std::move(look));
    }
    item.finish(status);
  }
  end_front(status, {});
  for (auto& look : looks) add(std::move(look));
}

// The front's items each send the same server a command of their own.
void RespConnection::ask_each(Request& answered, Kind kind) {
  std::vector<Item> items;
  items.reserve(answered.keys);
  if (answered.item) items.push_back(std::move(*answered.item));
  answered.item.reset();
  for (Item& item : std::exchange(answered.joined, {})) items.push_back(std::move(item));
  end_front(Status::kMiss, {});
  for (Item& item : items) add(std::make_unique<Request>(kind, std::move(item), settings_.ttl));
}

// The remaining time to live, in ms; -1: none, -2: the key is absent.
std::string RespConnection::on_age(Request& request, const RespToken& token) {
  if (token.kind != RespKind::kInteger || token.value < -2) return kUnexpected;
  const std::int64_t ttl_ms = settings_.ttl.count();
  const bool is_old = token.value != -2 && token.value <= ttl_ms - ttl_ms / 4;
  std::string key = std::move(request.key_text);
  end_front(Status::kMiss, {});
  if (is_old) add(std::make_unique<Request>(Kind::kRenew, std::move(key), settings_.ttl));
  return {};
}

// Asks for a used key's time to live now and then, so that it restarts at a recent use. A write per use would
// notify all followers of the server.
std::unique_ptr<RespRequest> RespConnection::look_at(const Item& used, Kind kind) {
  const std::string& key = used.key().text;
  const Op op = used.op();
  if (op == Op::kExpire) uses_.forget(key);  // the next use renews it
  if (op == Op::kContains || op == Op::kDelete || op == Op::kExpire) return nullptr;
  if (!renews_ || !uses_.is_due(key, settings_.ttl, Clock::now())) return nullptr;
  if (kind == Kind::kPut) return nullptr;  // its time to live just began
  return std::make_unique<Request>(Kind::kAge, key, settings_.ttl);
}

}  // namespace kvpool
