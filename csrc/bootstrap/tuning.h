// Thresholds of forming a group through the store.
// Measure: `rendezvous_test`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::bootstrap {

// -- Questions to the store

// The least time that the store gets to answer a question of a wait, even if the deadline of the
// wait is earlier. A rank that aborts the formation gives the store this time and no more.
// Below: the rank waits for the answer.
// Above: the question fails, but not before the deadline of the wait.
// Measure: `pytest tests/python/failures/test_store_connection.py`
inline constexpr std::chrono::seconds kStoreAnswerTimeout{1};

// A rank that waits for a key asks the store repeatedly. This is the pause after the first
// question. Each further pause is 1.5 times as long as the pause before it.
// Below: a smaller value asks more questions before the other ranks can have arrived.
// Above: a larger value delays the formation of a group whose ranks arrive together.
// Measure: `python -m benchmarks.scaling`
inline constexpr std::chrono::microseconds kFirstQuestionPause{50};

// The longest pause between two questions of a wait.
// Below: the pause grows, and the wait does not check for Ctrl-C.
// Above: the pause stays at the value, or at kPausePerKey times the number of keys if that is
// longer. From then on, Ctrl-C ends the wait.
// Measure: `python -m benchmarks.scaling`
inline constexpr std::chrono::microseconds kLongestQuestionPause{10'000};

// The longest pause after a question about n keys is n times this value, if that is longer than
// kLongestQuestionPause. In a large group, all ranks ask about many keys at the same time.
// Below: a smaller value floods the store with the questions of a thousand ranks.
// Above: a larger value delays the formation of a large group.
// Measure: `python -m benchmarks.scaling`
inline constexpr std::chrono::microseconds kPausePerKey{100};

// The time without an answer from the store after which a rank checks whether its peers live. The
// time doubles with each check.
// Below: the rank waits for the answer.
// Above: the rank checks its peers, then asks again.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py`
inline constexpr std::chrono::milliseconds kFirstStoreSilence{250};

// -- The introduction of the ranks

// The longest time that the other ranks wait for rank 0's introduction before they introduce
// themselves. They wait so that rank 0 watches them before other ranks depend on them.
// Below: the rank waits, except if kFirstRankTimeoutDivisor gives a shorter time.
// Above: the rank introduces itself.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::seconds kFirstRankTimeout{5};

// A rank waits for rank 0 for at most its remaining time divided by this value.
// Unit: parts of the time
// Below: a smaller value leaves less of a short timeout for the wait for the other ranks.
// Above: with a larger value and a short timeout, a rank introduces itself before rank 0 watches
// it, and its death is noticed later.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr int kFirstRankTimeoutDivisor = 4;

// The longest time that a rank waits until rank 0 watches it. Rank 0 then notices if the rank dies.
// Below: the rank waits before it introduces itself.
// Above: the rank introduces itself, watched or not.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py -k test_death_in_init`
inline constexpr std::chrono::seconds kWatchedTimeout{1};

// The time in which a rank that cannot take part publishes the reason.
// Below: the rank writes to the store.
// Above: the rank stops, and raises its own error.
// Measure: `pytest tests/python/failures/test_meeting.py -k
// test_a_rank_that_fails_before_it_meets_the_others`
inline constexpr std::chrono::seconds kEarlyFailureTimeout{1};

// The most unread records that a rank requests in one check while it waits for the other ranks.
// Unit: records
// Below: a smaller value reads the records of many early ranks late.
// Above: a larger value makes one check long, and deaths go unnoticed during it.
// Measure: `rendezvous_test --gtest_filter=Rendezvous.ReportsEachArrivalOnceAndEarlyOnesSoon`
inline constexpr size_t kRecordsPerCheck = 64;

// The period in which a waiting rank asks for unread records.
// Below: a smaller value burdens the store.
// Above: with a larger value, the rank begins later to watch the ranks that have arrived.
// Measure: `rendezvous_test --gtest_filter=Rendezvous.ReportsEachArrivalOnceAndEarlyOnesSoon`
inline constexpr std::chrono::milliseconds kRecordCheckPeriod{20};

// The longest list of members in which an error names each member.
// Unit: members
// Below: up to and including the value, each member is named.
// Above: consecutive members are named as a range.
// Measure: `rendezvous_test --gtest_filter=Members.ListsAreShort`
inline constexpr size_t kMembersNamedSingly = 16;

// -- The end of a formation

// The period in which a waiting rank asks the store whether another rank has ended the formation.
// Below: a smaller value burdens the store.
// Above: a larger value delays the error.
// Measure: `rendezvous_test
// --gtest_filter=Rendezvous.FailureInALaterStepEndsOtherWaits`
inline constexpr std::chrono::milliseconds kAbortCheckPeriod{200};

// In a group of more than 200 ranks, this value times the number of ranks replaces
// kAbortCheckPeriod.
// Below: a smaller value floods the store with the questions of a thousand ranks.
// Above: a larger value delays the error in a large group.
// Measure: `python -m benchmarks.scaling`
inline constexpr std::chrono::milliseconds kAbortCheckPeriodPerRank{1};

// The time in which a failing rank writes its record and waits for the other ranks. It waits
// because the store may end with this rank's process, and then no other rank could read the reason.
// Below: the rank waits until all ranks have written their records.
// Above: the rank raises its error.
// Measure: `rendezvous_test --gtest_filter=Rendezvous.ProblemOfOneRankReachesAll`
inline constexpr std::chrono::seconds kLastRecordTimeout{5};

// The time that the store gets, after a rank has died, to give the cause. The store has a cause if
// the rank aborted the formation before it died.
// Below: the rank waits for the cause.
// Above: the error names only the death.
// Measure: `pytest tests/python/failures/test_deaths_while_forming.py`
inline constexpr std::chrono::milliseconds kDeathCauseTimeout{200};

// -- Agreements

// A rank that has waited for the other ranks for this time writes a key of its own. An error names
// the ranks without such a key as missing.
// Below: the rank writes no key, and is only counted. If no rank waits longer, the agreement takes
// one key, the counter.
// Above: from the value on, the rank writes its key.
// Measure: `agreement_test --gtest_filter=Agreement.TakesOneKey`
inline constexpr std::chrono::milliseconds kNamelessWait{200};

// The time that the counted ranks get after the deadline to write their keys. Then an error names
// the missing ranks.
// Below: the rank waits until all counted ranks have keys.
// Above: from the value on, ranks without keys count as missing.
// Measure: `agreement_test --gtest_filter=Agreement.DoesNotNameARankThatJustArrived`
inline constexpr std::chrono::milliseconds kCountedRankTimeout{1000};

// The period in which a rank asks for the keys of the counted ranks.
// Below: a smaller value burdens the store.
// Above: a larger value delays the error.
// Measure: `agreement_test --gtest_filter=Agreement.DoesNotNameARankThatJustArrived`
inline constexpr std::chrono::milliseconds kCountedRankCheckPeriod{10};

// The time that the store has to delete the keys of a destroyed group.
// Below: destroying the group waits.
// Above: the destruction continues; the keys are deleted late or stay.
// Measure: `pytest tests/python/failures/test_store_keys.py`
inline constexpr std::chrono::milliseconds kKeyRemovalTimeout{200};

// -- The store that a member serves

// The longest sleep of a client that waits for its connection or for an answer.
// Below: the client sleeps until the socket is ready.
// Above: it wakes and checks the deadline. While it connects, it also makes the caller's check.
// Measure: `member_store_test --gtest_filter=MemberStore.CheckEndsAnAttempt`
inline constexpr std::chrono::milliseconds kMemberStoreCheckPeriod{10};

// The pause of a server that has no descriptor for another client.
// Below: a smaller value takes processor time.
// Above: a larger value keeps a client waiting after a descriptor has become free.
// Measure: `member_store_test --gtest_filter=MemberStore.ServesOnWithoutDescriptors`
inline constexpr std::chrono::milliseconds kFullPause{100};

}  // namespace hbm::bootstrap
