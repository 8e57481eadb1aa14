// The status of a client's connection to its box, and the texts about an outage.
//
// Connections that break before a reply arrives over them belong to one outage.
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
    kUnreachable,  // for too long, or closed: no further attempts
  };

  explicit ConnectionStatus(std::string box) : box_(std::move(box)) {}

  State state() const noexcept { return state_; }
  bool up() const noexcept { return state_ == State::kUp; }
  const std::string& box() const noexcept { return box_; }  // the URL

  // The box has answered a request over the connection that is up.
  void answered() noexcept { answered_ = true; }

  // From kUp to kBroken. `wanted`: an operation needs the box, so the log warns.
  void broke(const std::string& why, bool wanted);

  // Warns of the loss, once in an outage. REQUIRES: kBroken.
  void warn();

  void attempt_failed(const std::string& why) { last_attempt_ = why; }

  // From kBroken to kUp, and says so in the log.
  void restored(bool same_generation);

  // Changes kBroken to kUnreachable, and logs it.
  void set_unreachable();

  // The client is closed. Returns true if the connection was up.
  bool close() noexcept;

  // The outage in words: since when, and why, the box is unreachable.
  std::string outage() const;
  std::chrono::steady_clock::time_point broken_at() const noexcept { return broken_at_; }
  unsigned fruitless() const noexcept { return fruitless_; }

 private:
  std::string loss() const;

  const std::string box_;
  State state_ = State::kUp;
  bool answered_ = true;  // over the connection that is up, or was last

  // The outage:
  std::string why_;
  std::string last_attempt_;  // to connect again: how it failed
  std::chrono::system_clock::time_point since_{};
  std::chrono::steady_clock::time_point broken_at_{};
  bool warned_ = false;
  unsigned fruitless_ = 0;  // connections that broke before anything was answered over them
};

}  // namespace hbm::box::client
