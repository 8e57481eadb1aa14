// The status of a client's connection to its box, and the texts about an outage.
//
// An outage begins when a connection breaks. The outage continues if the next connection also
// breaks before the box has replied over it, while an operation needs the box.
//
// Threads: one at a time; the lock of the request table guards it.
#pragma once

#include <chrono>
#include <string>
#include <utility>

namespace hbm::box::client {

class ConnectionStatus {
 public:
  enum class State {
    kUp,
    kBroken,       // the reconnector makes another connection
    kUnreachable,  // no connection for reconnect_timeout, or closed: no further attempts
  };

  explicit ConnectionStatus(std::string box) : box_(std::move(box)) {}

  State state() const noexcept { return state_; }
  bool up() const noexcept { return state_ == State::kUp; }
  const std::string& box() const noexcept { return box_; }  // the URL

  // Records that the box has replied to a request over the current connection.
  void answered() noexcept { answered_ = true; }

  // Changes kUp to kBroken. `wanted`: true if an operation needs the box; then the log warns of the
  // loss.
  void broke(const std::string& why, bool wanted);

  // Logs a warning of the loss, once in an outage. REQUIRES: the state is kBroken.
  void warn();

  void attempt_failed(const std::string& why) { last_attempt_ = why; }

  // Changes kBroken to kUp, and logs it. `same_generation`: true if the box still has its data.
  void restored(bool same_generation);

  // Changes kBroken to kUnreachable, and logs it.
  void set_unreachable();

  // Changes any state to kUnreachable, because the client is closed. Returns true if the connection
  // was up.
  bool close() noexcept;

  // Returns a text about the outage: since when the box is unreachable, and why.
  std::string outage() const;
  std::chrono::steady_clock::time_point broken_at() const noexcept { return broken_at_; }
  unsigned fruitless() const noexcept { return fruitless_; }

 private:
  std::string loss() const;

  const std::string box_;
  State state_ = State::kUp;
  bool answered_ = true;  // the box has replied over the connection that is up, or that broke last

  // The outage:
  std::string why_;
  std::string last_attempt_;  // how the last attempt to connect again failed
  std::chrono::system_clock::time_point since_{};
  std::chrono::steady_clock::time_point broken_at_{};
  bool warned_ = false;
  unsigned fruitless_ = 0;  // connections that broke before the box replied over them
};

}  // namespace hbm::box::client
