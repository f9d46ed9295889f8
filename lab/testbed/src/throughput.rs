//! How much a TCP connection carries.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_units::Rate;
use rustix::io::ioctl_fionread;

const SILENCE_LIMIT: Duration = Duration::from_secs(30);
const CHUNK: usize = 256 << 10;

/// What a connection carries from `sender` to `receiver`, once it has had `start` to find out how
/// much that is, in the time `time` after. The connection is shut down then.
pub(crate) fn throughput(
    sender: &TcpStream,
    receiver: &TcpStream,
    start: Duration,
    time: Duration,
) -> anyhow::Result<Rate> {
    std::thread::scope(|scope| {
        scope.spawn(|| send_until_closed(sender));
        let received = receive_for(receiver, start).and_then(|_| {
            // A receiver that is held up finds afterwards what had come before: that was carried
            // when it came.
            let (began, waiting) = (Instant::now(), ioctl_fionread(receiver)?);
            let bytes = receive_for(receiver, time)?;
            let (took, left) = (began.elapsed(), ioctl_fionread(receiver)?);
            Ok((took, (bytes + left).saturating_sub(waiting)))
        });
        // Whatever has become of it, nobody sends on.
        for end in [sender, receiver] {
            let _ = end.shutdown(Shutdown::Both);
        }
        let (took, bytes) = received?;
        Ok(Rate::from_bytes_per_second(bytes as f64 / took.as_secs_f64()))
    })
}

fn send_until_closed(mut stream: &TcpStream) {
    let chunk = vec![0; CHUNK];
    while stream.write_all(&chunk).is_ok() {}
}

fn receive_for(mut stream: &TcpStream, time: Duration) -> anyhow::Result<u64> {
    let (until, mut bytes, mut chunk) = (Instant::now() + time, 0, vec![0; CHUNK]);
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    while Instant::now() < until {
        let count = stream.read(&mut chunk).context("nothing comes over the link")?;
        ensure!(count > 0, "the connection has ended");
        bytes += count as u64;
    }
    Ok(bytes)
}
