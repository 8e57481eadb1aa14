#include "box/client/connection_status.h"

#include <ctime>
#include <utility>

#include "base/log.h"

namespace hbm::box::client {
namespace {

std::string time_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[32];
  std::strftime(text, sizeof text, "%F %T", &local);
  return text;
}

}  // namespace

void ConnectionStatus::broke(const std::string& why, bool wanted) {
  state_ = State::kBroken;
  why_ = why;
  last_attempt_.clear();
  if (std::exchange(answered_, false) || !wanted) {
    since_ = std::chrono::system_clock::now();
    broken_at_ = std::chrono::steady_clock::now();
    warned_ = false;
    fruitless_ = 0;
  } else {
    ++fruitless_;
  }
  // Warn only if an operation needs the box, because a box may be closed before its idle clients.
  if (wanted) {
    warn();
  } else {
    log::info(loss());
  }
}

void ConnectionStatus::warn() {
  if (std::exchange(warned_, true)) return;
  log::warn(loss());
}

void ConnectionStatus::restored(bool same_generation) {
  state_ = State::kUp;
  const bool said = fruitless_ > 0 && same_generation;
  log::write((warned_ && !said) || !same_generation ? log::Level::kWarn : log::Level::kInfo,
             "connected again to the box at " + box_ +
                 (same_generation ? "" : ", which restarted without its data"));
}

void ConnectionStatus::set_unreachable() {
  state_ = State::kUnreachable;
  log::write(warned_ ? log::Level::kError : log::Level::kInfo, "gave up: " + outage());
}

bool ConnectionStatus::close() noexcept {
  return std::exchange(state_, State::kUnreachable) == State::kUp;
}

std::string ConnectionStatus::loss() const {
  return "lost the connection to the box at " + box_ + ": " + why_ + "; connecting again";
}

std::string ConnectionStatus::outage() const {
  const auto lasts =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now() - since_);
  std::string text = "the box at " + box_ + " is unreachable since " + time_text(since_) + " (" +
                     std::to_string(lasts.count()) + " s): " + why_;
  if (fruitless_ > 0) {
    text += "; " + std::to_string(fruitless_) +
            " connections since then broke before anything was answered over them";
  }
  if (!last_attempt_.empty()) text += "; the last attempt to connect again: " + last_attempt_;
  return text;
}

}  // namespace hbm::box::client
