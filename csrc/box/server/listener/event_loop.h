// A thread that waits for many descriptors with epoll. In each turn, the thread serves the ready
// descriptors, each once.
//
// Each descriptor stays with one loop, so no work passes between threads. If threads shared an
// epoll, each serving of a descriptor would need a system call to re-arm it.
//
// Threads: add(), change(), again() and all() may be called from any thread. Only the thread of the
// loop serves a Served.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/descriptor.h"

namespace hbm::box::server::listener {

class EventLoop {
 public:
  enum class Next {
    kWait,   // serve again when the descriptor is ready
    kAgain,  // serve again in the next turn, also without an event
    kGone,   // do not serve again
  };

  class Served {
   public:
    virtual ~Served() = default;

    // Handles `events`, which epoll has reported; epoll reports unhandled events again. `events` is
    // 0 after kAgain and again().
    virtual Next serve(uint32_t events) noexcept = 0;

    // Called once, when the loop no longer uses the descriptor, which may then be closed. The
    // thread of the loop calls it after kGone, or else ~EventLoop does.
    virtual void gone() noexcept = 0;

   private:
    friend class EventLoop;
    bool has_turn_ = false;  // true: it is in turn_; used only by the thread of the loop
  };

  // `name`: the name of the thread. The loop's thread calls `between_turns`, if there is one,
  // before each turn. The function returns the most milliseconds until the next call; negative: no
  // limit. Throws Error(kUnavailable) if the kernel provides no epoll or eventfd.
  EventLoop(std::string name, std::function<int()> between_turns);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void start();
  void stop();  // ends the thread

  // Throws Error(kUnavailable) if epoll rejects the descriptor.
  void add(int descriptor, uint32_t events, std::shared_ptr<Served> served);

  // REQUIRES: `served` was added with this descriptor, which is still open.
  void change(int descriptor, uint32_t events, Served& served) noexcept;

  // Serves `served` in the next turn, if the loop still has it.
  void again(const Served& served);

  std::vector<std::shared_ptr<Served>> all() const;

 private:
  using Turn = std::vector<std::shared_ptr<Served>>;

  void run();
  void serve(Served& served, uint32_t events);
  void give_turn(const std::shared_ptr<Served>& served);
  void remove(Served& served);
  void wake() noexcept;

  struct Watched {
    int descriptor;
    std::shared_ptr<Served> served;
  };

  const std::string name_;
  const std::function<int()> between_turns_;
  const Descriptor epoll_;
  const Descriptor bell_;  // an eventfd
  std::thread thread_;
  Turn turn_;  // served in the next turn; used only by the thread

  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<const Served*, Watched> watched_;
  Turn asked_;  // turns requested by again()
  bool stopping_ = false;
};

}  // namespace hbm::box::server::listener
