#include "box/server/reply_window.h"

#include <algorithm>
#include <string>
#include <utility>

#include "box/server/refusal.h"

namespace hbm::box {
namespace {

[[noreturn]] void refuse(const smb::Sequence& sequence, const std::string& cause) {
  throw Refusal(smb::Status::kMalformed, "request number " + std::to_string(sequence.number) +
                                             " (replies had up to " +
                                             std::to_string(sequence.answered) + "): " + cause);
}

}  // namespace

ReplyWindow::Turn ReplyWindow::turn(const smb::Sequence& sequence) {
  const uint64_t last = applied();
  if (sequence.number == 0 || sequence.number > last + 1) {
    refuse(sequence, "the next one is " + std::to_string(last + 1));
  }
  if (sequence.number <= std::max(answered_, sequence.answered)) {
    refuse(sequence, "it was answered, and the client had the reply");
  }
  if (sequence.answered > last) {
    refuse(sequence, "only " + std::to_string(last) + " were carried out");
  }
  if (sequence.number - sequence.answered > smb::kWindow) {
    refuse(sequence, "at most " + std::to_string(smb::kWindow) + " may be under way");
  }
  answered_ = std::max(answered_, sequence.answered);
  while (!replies_.empty() && last - replies_.size() < answered_) replies_.pop_front();
  if (sequence.number > last) return Turn::kNew;
  return sequence.number > restored_ ? Turn::kSaved : Turn::kForeign;
}

const Reply& ReplyWindow::saved(uint64_t number) const {
  return replies_.at(replies_.size() - 1 - (applied() - number));
}

void ReplyWindow::save(Reply reply) {
  reply.granted.reset();
  replies_.push_back(std::move(reply));
}

}  // namespace hbm::box
