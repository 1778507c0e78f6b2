// Streams in plain and under TLS: no byte is lost, doubled or made up, whatever the socket takes and the peer
// does.
#include "store/stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store/tls_peer.h"

namespace kvpool {
namespace {

using test::Certificate;
using test::TlsPeer;
using State = Stream::State;

TlsContext trusting(const Certificate& certificate) { return TlsContext({certificate.cert(), "", ""}); }

std::string make_text(std::size_t nbytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(nbytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

Stream::Result send_text(Stream& stream, std::string& text) {
  const iovec part{text.data(), text.size()};
  return stream.send({&part, 1});
}

// All that comes until the stream says something else; that is in `last`.
std::string receive_all(Stream& stream, State& last, std::size_t at_once = 65536) {
  std::string all;
  std::vector<char> piece(at_once);
  for (;;) {
    const iovec part{piece.data(), piece.size()};
    const Stream::Result result = stream.receive({&part, 1});
    last = result.state;
    if (last != State::kMoved) return all;
    CHECK(result.nbytes != 0 && result.nbytes <= piece.size());
    all.append(piece.data(), result.nbytes);
  }
}

std::string refusal(const TlsFiles& files) {
  try {
    const TlsContext context(files);
  } catch (const TlsError& error) {
    return error.what();
  }
  return "taken";
}

bool has(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

}  // namespace

TEST(stream_in_plain_moves_bytes_and_sees_the_end) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  Stream one{Descriptor(ends[0])};
  Stream other{Descriptor(ends[1])};
  CHECK(one && !Stream());
  CHECK(one.handshake().state == State::kMoved);
  State last;
  CHECK(receive_all(other, last).empty() && last == State::kBlocked);
  std::string text = "hello";
  CHECK(send_text(one, text).nbytes == 5);
  CHECK(!one.owes() && !one.has_pending());
  CHECK(receive_all(other, last) == "hello" && last == State::kBlocked);
  CHECK(one.events(false) == POLLIN && one.events(true) == (POLLIN | POLLOUT));
  one.reset();
  CHECK(receive_all(other, last).empty() && last == State::kClosed);
  CHECK(other.error() == "the server closed the connection");
  CHECK(send_text(other, text).state == State::kFailed);  // and no SIGPIPE
}

TEST(stream_tls_sends_parts_of_all_sizes_once_and_in_order) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    TlsPeer::Options options;
    options.version = version;
    options.socket_nbytes = 9000;  // less than a record: some of each is owed
    TlsPeer peer(tls, certificate, options);
    CHECK(peer.shake_hands().state == State::kMoved);
    std::mt19937 random(1);
    std::string all, heard;
    bool owed = false;
    for (unsigned turn = 0; turn < 40; ++turn) {
      std::vector<std::string> texts;
      for (unsigned i = 0; i < 12; ++i) {
        constexpr std::size_t kSizes[] = {0, 1, 100, 4095, 4096, 16383, 16384, 16385, 70000};
        texts.push_back(make_text(kSizes[random() % std::size(kSizes)], turn * 100 + i));
        all += texts.back();
      }
      std::size_t first = 0, at = 0;
      while (first < texts.size()) {
        std::vector<iovec> parts;
        for (std::size_t i = first; i < texts.size(); ++i) {
          const std::size_t skipped = i == first ? at : 0;
          parts.push_back({texts[i].data() + skipped, texts[i].size() - skipped});
        }
        Stream::Result sent = peer.stream.send(parts);
        CHECK(sent.state != State::kFailed && sent.state != State::kClosed);
        // What was taken is the caller's again: it must not be looked at any more.
        for (std::size_t left = sent.nbytes; first < texts.size();) {
          const std::size_t now = std::min(left, texts[first].size() - at);
          std::fill_n(texts[first].begin() + static_cast<std::ptrdiff_t>(at), now, 'X');
          left -= now;
          at += now;
          if (at < texts[first].size()) break;
          ++first;
          at = 0;
        }
        owed |= peer.stream.owes();
        CHECK(!peer.stream.owes() || (peer.stream.events(false) & POLLOUT) != 0);
        if (sent.state == State::kBlocked) CHECK(peer.pump());
        heard += peer.heard();
      }
    }
    while (peer.stream.owes()) {
      peer.pump();
      CHECK(peer.stream.send({}).state != State::kFailed);
    }
    peer.pump();
    heard += peer.heard();
    CHECK(owed);
    CHECK(heard == all);
  }
}

TEST(stream_tls_receives_into_pieces_of_any_size) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  for (const std::size_t at_once : {1UL, 7UL, 16384UL, 262144UL, 1000000UL}) {
    TlsPeer peer(tls, certificate);
    CHECK(peer.shake_hands().state == State::kMoved);
    const std::string text = make_text(at_once == 1 ? 40000 : 900000, 3);
    peer.say(text);
    std::string got;
    State last;
    while (peer.pump() || peer.stream.has_pending()) got += receive_all(peer.stream, last, at_once);
    CHECK(got == text && last == State::kBlocked);
  }
}

TEST(stream_tls_tells_of_bytes_that_poll_does_not_show) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer peer(tls, certificate);
  CHECK(peer.shake_hands().state == State::kMoved);
  peer.say("first");
  peer.say("second");  // a record of its own
  peer.pump();
  char c;
  const iovec part{&c, 1};
  for (std::size_t i = 0; i < 11; ++i) {
    CHECK(i == 0 || peer.stream.has_pending());
    CHECK(peer.stream.receive({&part, 1}).nbytes == 1);
    pollfd asked{peer.stream.fd(), POLLIN, 0};
    CHECK(poll(&asked, 1, 0) == 0);
  }
  CHECK(!peer.stream.has_pending());
}

TEST(stream_tls_takes_goodbye_and_silence_for_the_end) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  for (const bool politely : {false, true}) {
    TlsPeer peer(tls, certificate);
    CHECK(peer.shake_hands().state == State::kMoved);
    peer.say("last words");
    if (politely) peer.say_goodbye();
    peer.pump();
    if (!politely) peer.hang_up();
    State last;
    CHECK(receive_all(peer.stream, last) == "last words");
    CHECK(last == State::kClosed && peer.stream.error() == "the server closed the connection");
    CHECK(peer.stream.has_pending());  // so that nobody waits for poll() to show it
    CHECK(receive_all(peer.stream, last).empty() && last == State::kClosed);
  }
}

TEST(stream_tls_hears_what_was_said_before_it_could_not_send) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer peer(tls, certificate);
  CHECK(peer.shake_hands().state == State::kMoved);
  peer.say("no, because");
  peer.pump();
  peer.hang_up();
  std::string text(100000, 'x');
  // The caller has to know that some of it may have gone, before it knows that no more will.
  const Stream::Result first = send_text(peer.stream, text);
  CHECK(first.state == State::kMoved && first.nbytes != 0);
  CHECK(send_text(peer.stream, text).state == State::kFailed);
  State last;
  CHECK(receive_all(peer.stream, last) == "no, because" && last == State::kClosed);
}

TEST(stream_tls_gives_no_bytes_of_a_record_that_was_changed) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  const std::string text = make_text(50000, 4);
  for (std::size_t position = 0; position < 50000; position += 1 + position / 3) {
    TlsPeer peer(tls, certificate);
    CHECK(peer.shake_hands().state == State::kMoved);
    State last;
    receive_all(peer.stream, last);  // the server's tickets
    std::size_t passed = 0;
    peer.harm = [&](std::string& said) {
      if (passed <= position && position < passed + said.size()) said[position - passed] ^= 1;
      passed += said.size();
    };
    peer.say(text);
    peer.pump();
    std::string got = receive_all(peer.stream, last);
    while (last == State::kBlocked && peer.pump()) got += receive_all(peer.stream, last);
    // A longer length in a record's head may leave it waiting; the I/O thread's deadline ends that.
    CHECK(last == State::kFailed || (last == State::kBlocked && position < 5));
    CHECK(got.size() <= position && text.starts_with(got));
  }
}

TEST(stream_tls_answers_new_keys_while_the_socket_is_full) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer::Options options;
  options.socket_nbytes = 9000;
  TlsPeer peer(tls, certificate, options);
  CHECK(peer.shake_hands().state == State::kMoved);
  std::string text = make_text(400000, 5);
  std::size_t sent = 0;
  while (!peer.stream.owes()) {
    const iovec part{text.data() + sent, text.size() - sent};
    sent += peer.stream.send({&part, 1}).nbytes;
  }
  std::string got, heard;
  State last;
  peer.ask_for_new_keys();
  peer.say("under new keys");
  while (sent < text.size() || peer.stream.owes()) {
    peer.pump();
    heard += peer.heard();
    got += receive_all(peer.stream, last);
    const iovec part{text.data() + sent, text.size() - sent};
    sent += peer.stream.send({&part, sent < text.size() ? 1U : 0U}).nbytes;
  }
  peer.pump();
  CHECK(heard + peer.heard() == text);
  CHECK(got == "under new keys");
}

TEST(stream_tls_ends_with_a_peer_that_asks_and_does_not_read) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer::Options options;
  options.socket_nbytes = 9000;
  TlsPeer peer(tls, certificate, options);
  CHECK(peer.shake_hands().state == State::kMoved);
  std::string text(400000, 'x');
  std::size_t sent = 0;
  while (!peer.stream.owes()) sent += send_text(peer.stream, text).nbytes;
  int ended = 0;
  State last = State::kBlocked;
  for (; ended < 100000 && last == State::kBlocked; ++ended) {
    peer.ask_for_new_keys();
    peer.send_only();
    CHECK(receive_all(peer.stream, last).empty());
  }
  CHECK(last == State::kFailed);
}

TEST(stream_tls_accepts_the_name_that_was_asked_for_only) {
  const Certificate certificate;
  const Certificate another;
  const TlsContext tls = trusting(certificate);
  const auto words = [&](const TlsContext& context, const std::string& host) {
    TlsPeer::Options options;
    options.host = host;
    TlsPeer peer(context, certificate, options);
    const Stream::Result result = peer.shake_hands();
    if (result.state == State::kMoved) return std::string();
    CHECK(result.state == State::kFailed);
    return peer.stream.error();
  };
  CHECK(words(tls, "server").empty());
  CHECK(words(tls, "127.0.0.1").empty());
  CHECK(words(tls, "other") == "certificate verify failed: hostname mismatch");
  CHECK(words(tls, "test") == "certificate verify failed: hostname mismatch");  // its common name
  CHECK(words(tls, "127.0.0.2") == "certificate verify failed: IP address mismatch");
  CHECK(words(TlsContext({another.cert(), "", ""}), "server").starts_with("certificate verify failed: "));
  CHECK(words(TlsContext(TlsFiles{}), "server").starts_with("certificate verify failed: "));
}

TEST(stream_tls_shows_a_client_certificate_where_one_is_demanded) {
  const Certificate certificate;
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    TlsPeer::Options options;
    options.demands_certificate = true;
    options.version = version;
    State last = State::kMoved;
    {
      const TlsContext tls({certificate.cert(), certificate.cert(), certificate.key()});
      TlsPeer peer(tls, certificate, options);
      CHECK(peer.shake_hands().state == State::kMoved);
      peer.say("welcome");
      peer.pump();
      CHECK(receive_all(peer.stream, last) == "welcome");
    }
    const TlsContext tls = trusting(certificate);
    TlsPeer peer(tls, certificate, options);
    last = peer.shake_hands().state;
    // By TLS 1.3 the client is done before the server has judged it.
    CHECK((version == TLS1_3_VERSION) == (last == State::kMoved));
    if (last == State::kMoved) receive_all(peer.stream, last);
    CHECK(last == State::kFailed);
    CHECK(has(peer.stream.error(), version == TLS1_3_VERSION ? "certificate required" : "handshake failure"));
  }
}

TEST(stream_tls_speaks_no_older_version) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer::Options options;
  options.version = TLS1_1_VERSION;
  TlsPeer peer(tls, certificate, options);
  CHECK(peer.shake_hands().state == State::kFailed);
}

TEST(stream_tls_waits_for_a_server_that_says_nothing) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  TlsPeer peer(tls, certificate);
  CHECK(peer.stream.handshake().state == State::kBlocked);
  CHECK(peer.stream.handshake().state == State::kBlocked);
  CHECK(peer.stream.events(false) == POLLIN);
  peer.hang_up();  // with something unread
  CHECK(peer.stream.handshake().state == State::kFailed);
  CHECK(peer.stream.error() == "Connection reset by peer");
}

TEST(stream_tls_many_threads_share_a_context) {
  const Certificate certificate;
  const TlsContext tls = trusting(certificate);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (unsigned round = 0; round < 5; ++round) {
        TlsPeer peer(tls, certificate);
        CHECK(peer.shake_hands().state == State::kMoved);
        const std::string text = make_text(100000, i);
        peer.say(text);
        std::string got;
        State last;
        while (peer.pump() || peer.stream.has_pending()) got += receive_all(peer.stream, last);
        CHECK(got == text);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(tls_files_that_cannot_be_used_are_named) {
  const Certificate certificate;
  const Certificate another;
  const std::string missing = certificate.cert() + ".missing";
  const std::string noise = certificate.cert() + ".noise";
  std::ofstream(noise) << "no PEM";
  CHECK(has(refusal({missing, "", ""}), "authorities cannot be read: No such file or directory"));
  CHECK(has(refusal({noise, "", ""}), "the file of authorities cannot be used: "));
  CHECK(
      has(refusal({"", missing, certificate.key()}), "the client certificate cannot be read: No such file"));
  CHECK(has(refusal({"", noise, certificate.key()}), "the client certificate cannot be used: no start line"));
  CHECK(has(refusal({"", certificate.cert(), missing}), "the private key cannot be read: No such file"));
  CHECK(has(refusal({"", certificate.cert(), noise}), "the private key cannot be used: "));
  CHECK(has(refusal({"", certificate.cert(), another.key()}),
            "the private key cannot be used: key values mismatch"));
  CHECK(refusal({"", certificate.cert(), another.key()}).starts_with(another.key()));
}

}  // namespace kvpool
