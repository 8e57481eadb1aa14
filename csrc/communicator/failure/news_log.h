// A list in the store, by which the processes of a job tell one another: each adds to it, and reads
// it to the end. An entry that its writer did not live to write is passed over.
//
// Threads: one at a time.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bootstrap/key_value.h"

namespace hbm::failure {

enum class NewsKind { kDeath, kFailure, kClosing, kClaimedTwice };

struct News {
  NewsKind kind;
  std::string about;  // kDeath: a process' id; else a group's key
  std::string text;   // kClosing: the rank of the group that serves the store
};

// One entry as text, in the store and in a mailbox.
std::string format(const News& entry);
std::optional<News> parse(const std::string& record);  // none: no entry of this version

class NewsLog {
 public:
  explicit NewsLog(std::shared_ptr<KeyValue> store) : store_(std::move(store)) {}

  // Writes `entries`, dropping each once it is in the store, and hands over those that have come
  // since the last call, the own ones among them. Throws what the store throws.
  void exchange(std::deque<News>& entries, KeyValue::Deadline deadline,
                const std::function<void(const News&)>& heard);

 private:
  const std::shared_ptr<KeyValue> store_;
  long read_ = 0;                // entries that are known to have a number
  std::map<long, int> missing_;  // of these, the unread: how often they were looked for
};

}  // namespace hbm::failure
