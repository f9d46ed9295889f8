//! How long anything is waited for.
//!
//! A dead link is found by the kernel (`TCP_USER_TIMEOUT` and keep-alive, tcp(7)), and on every
//! transport by the peer's silence; the other limits are for a peer that is alive and does not go
//! on.

use std::time::Duration;

/// A TCP connection to the destination.
pub const CONNECT: Duration = Duration::from_secs(10);
/// A source that only asks, behind the answer, as long as it tries what the connection carries.
pub const TRIAL: Duration = Duration::from_secs(5);
/// A greeting of a peer that has connected.
pub const GREETING: Duration = Duration::from_secs(5);
/// The greeting of a destination that a source has connected to for the first time: who waits there
/// is a person who may have mistyped the port.
pub const FIRST_GREETING: Duration = Duration::from_secs(2);
/// Data on the way unacknowledged by the peer's kernel, the silence after which keep-alive gives
/// up, and the silence of the peer itself on the control connection.
pub const LINK: Duration = Duration::from_secs(10);
/// How often each side says on the control connection that it is there.
pub const ALIVE: Duration = Duration::from_secs(1);
/// An answer on the control connection; also covers what socket buffers hold, on a slow link.
pub const ANSWER: Duration = Duration::from_secs(60);
/// Pages of a round that the source has sent, while nothing of them comes and its control
/// connection stands: they are lost, and the guest may stand still for them.
pub const STALL: Duration = Duration::from_secs(5);
/// Packets that came for a guest's cards while it stood still: more of them are somebody's who
/// wants the destination to be busy.
pub const LATE_PACKETS: u64 = 1 << 16;
/// The time that is taken at once for those that are there already, on either side, while other
/// work waits.
pub const LATE_BURST: Duration = Duration::from_millis(5);
/// An answer of the source's adapter to a question of the destination's.
pub const QUESTION: Duration = Duration::from_secs(20);
/// One write to a socket without any progress.
pub const WRITE: Duration = Duration::from_secs(20);
/// The same for pages: a destination may need long for a few of them, as for a huge page of 1 GiB
/// or on a disk that stands still. Its control connection tells meanwhile that it is there. It is
/// longer than a destination waits for its storage (60 s), so that it can say what it waited for.
pub const PLACE: Duration = Duration::from_secs(75);
/// From COMMIT to the word that the guest runs; longer than an adapter waits for its machine.
pub const RUNNING: Duration = Duration::from_secs(30);
/// Storage that a copy of what is missing is written to, without any progress, which is 64 MiB
/// brought there (fsync(2)): the guest stands still for it.
pub const STORAGE: Duration = Duration::from_secs(30);
/// What was written to disks being read back, before the guest is stopped; shorter than a source
/// waits for an answer.
pub const READ_BACK: Duration = Duration::from_secs(50);
/// The attempts of a source in doubt to ask the destination.
pub const RESOLVE: Duration = Duration::from_secs(60);
/// How long connections that were lost in pre-copy are tried for, and waited for at the
/// destination, if nothing else is said.
pub const RECONNECT: Duration = Duration::from_secs(60);
/// The same when the guest runs at the destination and pages are missing there: ten years, since to
/// give up would lose it.
pub const ENDLESS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Before each attempt to make them again. An attempt is one connection; a link that is back and
/// not yet used costs the move just this long.
pub const RETRY: Duration = Duration::from_millis(25);
/// A TCP connection of such an attempt. The kernel asks again after 1 s, and then ever more seldom
/// (RFC 6298); a new attempt asks at once.
pub const RETRY_CONNECT: Duration = Duration::from_secs(1);
/// The answer to one attempt: the destination first places what has arrived.
pub const RESUME: Duration = Duration::from_secs(10);
/// A destination that is ready, and has lost the source, waits this long for its word.
pub const LINGER: Duration = Duration::from_secs(120);
/// The attempt to tell the peer that it is over.
pub const ABORT: Duration = Duration::from_secs(1);
/// The wait for the reason of a peer whose channel broke.
pub const WORDS: Duration = Duration::from_secs(5);
/// How often waits look whether the operator cancelled, and progress is reported.
pub const TICK: Duration = Duration::from_millis(100);
