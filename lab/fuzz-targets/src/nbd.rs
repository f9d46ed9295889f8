//! What an NBD server says: the handshake, and replies to a read, a status and a flush.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use godwit_nbd::{ALLOCATION, Client, Wish};

/// Less than a socket holds, so that nobody need read meanwhile.
const MOST: usize = 64 << 10;
const LENGTH: u32 = 4096;

/// The first byte says whether contexts are asked for; what follows is all that the server says.
pub(crate) fn replies(bytes: &[u8]) {
    let Some((first, said)) = bytes.split_first() else { return };
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let written = theirs.write_all(&said[..said.len().min(MOST)]);
    if written.and_then(|()| theirs.shutdown(Shutdown::Write)).is_err() {
        return;
    }
    let contexts = first & 1 == 1;
    let wish = Wish::new("disk");
    let wish = if contexts { wish.with_context(ALLOCATION) } else { wish };
    let mut client = match Client::over_unix(ours, &wish) {
        Ok(client) => client,
        Err(error) => return drop(error.to_string()),
    };
    if client.export().size < u64::from(LENGTH) {
        return;
    }
    let (Ok(read), Ok(flush)) = (client.ask_read(0, LENGTH), client.ask_flush()) else { return };
    let status = contexts.then(|| client.ask_status(0, LENGTH));
    let mut buffer = [0; LENGTH as usize];
    if let Err(error) = client.take_read(read, &mut buffer) {
        let _ = error.to_string();
    }
    if let Some(Ok(status)) = status
        && let Ok(told) = client.take_status(status)
    {
        assert_eq!(told.len(), 1);
        let mut next = 0;
        for stretch in &told[0] {
            assert_eq!(stretch.offset, next, "without gaps");
            assert!(stretch.length > 0);
            next += stretch.length;
        }
        assert!(next > 0 && next <= u64::from(LENGTH));
    }
    if let Some(flush) = flush {
        let _ = client.take_done(flush);
    }
}
