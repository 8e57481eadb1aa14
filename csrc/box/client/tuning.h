// Thresholds of a box's client: copies from and to mapped segments, pings, and reconnects.
// Measure: `pytest tests/python/box/test_smb_reconnect.py`

#pragma once

#include <chrono>
#include <cstddef>

namespace hbm::box::client {

// -- The progress engine

// The bytes of queued copies that the engine makes in one turn, a call of ProgressEngine::step().
// Unit: bytes
// Below: the turn takes the next copy.
// Above: the turn ends after the copy that reaches the value, so the engine sends, receives and
// pings before the next one.
// Measure: `hbmcomm bench box --sections shm`
inline constexpr size_t kCopiedBytesPerTurn = 64 << 10;

// Requests in flight that have no sequence number: transfers, pings, and queries (kStats, kExists).
// The limit of sequenced requests is protocol::kSequencedInFlight.
// Unit: requests
// Below: the engine posts the next one.
// Above: from the value on, requests wait in the table until a reply comes.
// Measure: `python -m papers.connections --quick`
inline constexpr size_t kUnsequencedInFlight = 64;

// The period at which a waiting thread calls `while_waiting`, which throws if a signal such as
// Ctrl-C has arrived.
// Below: a smaller value wakes waiting threads more often.
// Above: a larger value lets Ctrl-C wait longer.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k test_ctrl_c_ends_a_wait`
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

// Pings in each lease of the session, while the client sends no requests except reads and writes.
// Unit: pings
// Below: a smaller value risks the session when a ping is late.
// Above: a larger value wakes idle clients more often.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k test_a_client_is_one_session`
inline constexpr int kPingsPerLease = 3;

// The least time that the box has to reply to a ping if all other requests in flight are quick
// (is_quick()). The time is the lease instead if the lease is longer, or if only the ping is in
// flight. There is no limit while a request that is not quick is in flight.
// Below: the client continues to wait: the box may be busy with the requests before the ping.
// Above: the client assumes that the box hangs, breaks the connection off, and connects again.
inline constexpr std::chrono::seconds kHungBoxTimeout{10};

// -- The reconnector

// The delay after the first failed attempt to connect. It doubles with each further failed attempt.
// Below: a smaller value burdens a box that restarts.
// Above: a larger value extends a short outage.
inline constexpr std::chrono::milliseconds kFirstReconnectDelay{10};

// The longest delay between two attempts to connect.
// Below: each failed attempt doubles the delay.
// Above: the delay stays at the value.
inline constexpr std::chrono::milliseconds kLongestReconnectDelay{1000};

// The least time for one attempt to connect.
// Below: if less is left of `reconnect_timeout`, the attempt still has the value.
// Above: the attempt has the rest of `reconnect_timeout`, at most `connect_timeout`.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k test_a_box_that_stays_away`
inline constexpr std::chrono::milliseconds kShortestConnectTimeout{100};

// The time for the box to attach all segments again over a new connection.
// Below: the client waits for the replies.
// Above: the attempt has failed, and the next one begins.
inline constexpr std::chrono::seconds kReattachTimeout{30};

// The period at which the reconnector checks for a close() while it waits for replies to kAttach.
// Below: a smaller value wakes it more often.
// Above: a larger value delays close().
inline constexpr std::chrono::milliseconds kClosePollPeriod{100};

// The time until the reconnector tries again to hold the engine, if another thread holds it.
// Below: a smaller value wakes it more often.
// Above: a larger value delays requests for which no thread waits.
inline constexpr std::chrono::milliseconds kHeldEnginePollPeriod{10};

// The period at which the reconnector checks whether the box has ended, if the transport has no
// descriptor that poll() could watch.
// Below: a smaller value wakes idle clients more often.
// Above: a larger value delays the notice of the box's end.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k test_an_idle_client_notices_the_end`
inline constexpr std::chrono::milliseconds kLivenessPollPeriod{100};

// The longest sleep of the reconnector while poll() watches a descriptor for the box's end.
// Below: it sleeps until the next ping or deadline.
// Above: it wakes and sleeps again.
inline constexpr std::chrono::hours kLongestIdleSleep{1};

// -- Opening and closing

// The time for which a closing client waits for the reply of the box to its kLeave.
// Below: the reply arrives, so the box has released the attachments of the client.
// Above: the client closes the connection, and the box releases the attachments at the lease's end
// at the latest.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k
// test_close_has_its_patience_and_no_more`
inline constexpr std::chrono::seconds kLeaveTimeout{1};

// The longest time that an option or an argument sets: a century.
// Below: the time is taken as it is.
// Above: the time counts as the value, so that adding it to the current time does not overflow.
// Measure: `pytest tests/python/box/test_smb_reconnect.py -k test_an_endless_time_is_endless`
inline constexpr std::chrono::hours kLongestTimeout{24 * 365 * 100};

}  // namespace hbm::box::client
