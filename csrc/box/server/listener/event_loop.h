// A thread that waits for many descriptors at once, and serves those that are ready in turn.
//
// Each stays with its loop: nothing is handed from thread to thread between the kernel's notice and
// the service, and re-arming costs no system call, as it would with threads that share an epoll.
//
// Threads: add(), change(), again() and all() may be called from any thread. A Served is served by
// the loop's thread alone, once in a turn.
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

namespace hbm::box {

class EventLoop {
 public:
  enum class Next {
    kWait,   // until its descriptor is ready
    kAgain,  // when the others have had their turn
    kGone,   // never
  };

  class Served {
   public:
    virtual ~Served() = default;

    // `events` of epoll, which come again if they are not seen to; 0 after kAgain and again().
    virtual Next serve(uint32_t events) noexcept = 0;

    // The loop has let go of its descriptor, which may be closed. Called once, by the loop's thread
    // after kGone or by ~EventLoop.
    virtual void gone() noexcept = 0;

   private:
    friend class EventLoop;
    bool has_turn_ = false;  // the loop's thread's own
  };

  // `name` is the thread's. `between_turns` may be empty; it returns in how many milliseconds it
  // wants to be called again at the latest (negative: it does not care).
  // Throws Error(kUnavailable) when the kernel refuses.
  EventLoop(std::string name, std::function<int()> between_turns);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void start();
  void stop();  // ends the thread

  // Throws Error(kUnavailable) when the kernel refuses.
  void add(int descriptor, uint32_t events, std::shared_ptr<Served> served);

  // REQUIRES: it was added with this descriptor, which is still open.
  void change(int descriptor, uint32_t events, Served& served) noexcept;

  // Serves it soon, if it is still there.
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
  Turn turn_;  // of those that have more to do; the thread's own

  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<const Served*, Watched> watched_;
  Turn asked_;  // for a turn, by again()
  bool stopping_ = false;
};

}  // namespace hbm::box
