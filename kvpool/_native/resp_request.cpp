#include "resp_request.h"

#include <algorithm>

#include "resp_dial.h"

namespace kvpool {

// What is asked for the item, from the start.
void RespRequest::compose() {
  const std::string& key = item->key().text;
  head = asking ? kAsking : std::string_view();
  const bool moves_bytes = kind == Kind::kPut || kind == Kind::kGet;
  const std::size_t tail = std::min(moves_bytes ? item->buffer().size() : 0, kRespTailNbytes);
  switch (kind) {
    case Kind::kPut:
      body = item->buffer().first(item->buffer().size() - tail);
      head += "*6\r\n$4\r\nHSET\r\n$" + std::to_string(key.size()) + "\r\n" + key + "\r\n$1\r\nb\r\n$" +
              std::to_string(body.size()) + "\r\n";
      break;
    case Kind::kGet:
      into = item->buffer().first(item->buffer().size() - tail);
      into_tail = item->buffer().last(tail);
      append_command(head, {"HMGET", key, "h", "b"});
      break;
    case Kind::kContains:
      append_command(head, {"EXISTS", key});
      break;
    case Kind::kTouch:
      append_command(head, {"TOUCH", key});
      break;
    case Kind::kDelete:
    case Kind::kCleanup:
      append_command(head, {"UNLINK", key});
      break;
  }
  end_made = kind != Kind::kPut;
}

}  // namespace kvpool
