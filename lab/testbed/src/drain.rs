//! Whoever has a VM stop reads its device state, as an engine does.

use std::io::{self, Read};
use std::thread::JoinHandle;

/// Reads `state` to its end, in a thread, which returns how many bytes there were.
///
/// QEMU saves what memory its devices have before it stops the guest, about 210 KB in these VMs,
/// and waits when nobody reads: a socket takes a little less or a little more than that.
pub fn drained(mut state: Box<dyn Read + Send>) -> JoinHandle<u64> {
    std::thread::spawn(move || io::copy(&mut state, &mut io::sink()).unwrap_or_default())
}
