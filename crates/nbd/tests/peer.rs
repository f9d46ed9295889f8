//! A made-up server over a socket pair: answers out of order, answers that lie, and silence.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use godwit_nbd::{ALLOCATION, Client, NbdError, Stretch, Wish};
use proptest::prelude::*;

const SIZE: u64 = 1 << 20;

/// What a server says in the handshake, with the options' answers in the order in which the client
/// asks.
fn handshake(contexts: bool, flags: u16) -> Vec<u8> {
    let mut said = b"NBDMAGICIHAVEOPT".to_vec();
    said.extend(3u16.to_be_bytes());
    said.extend(option_reply(8, 1, &[]));
    if contexts {
        said.extend(option_reply(10, 4, &[&7u32.to_be_bytes(), ALLOCATION.as_bytes()].concat()));
        said.extend(option_reply(10, 1, &[]));
    }
    let export = [&0u16.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags.to_be_bytes()].concat();
    said.extend(option_reply(7, 3, &export));
    said.extend(option_reply(7, 1, &[]));
    said
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let head =
        [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()];
    [&head.concat()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn chunk(done: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let head =
        [&0x668e_33efu32.to_be_bytes()[..], &u16::from(done).to_be_bytes(), &kind.to_be_bytes()];
    let length = (payload.len() as u32).to_be_bytes();
    [&head.concat()[..], &cookie.to_be_bytes(), &length, payload].concat()
}

fn data(done: bool, cookie: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(done, 1, cookie, &[&offset.to_be_bytes(), bytes].concat())
}

/// A server that says `words` whatever it hears, and hears until the client goes.
fn server(words: Vec<u8>) -> (UnixStream, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut hearing = theirs.try_clone().unwrap();
        let listener = std::thread::spawn(move || {
            let _ = std::io::copy(&mut hearing, &mut std::io::sink());
        });
        let _ = theirs.write_all(&words);
        let _ = theirs.shutdown(std::net::Shutdown::Write);
        listener.join().unwrap();
    });
    (ours, thread)
}

fn client(contexts: bool, replies: &[u8]) -> Client {
    let words = [&handshake(contexts, 0b100_0111)[..], replies].concat();
    let wish = Wish::new("disk");
    let wish = if contexts { wish.with_context(ALLOCATION) } else { wish };
    Client::over_unix(server(words).0, &wish).unwrap()
}

fn read(replies: &[u8]) -> Result<Vec<u8>, NbdError> {
    let mut client = client(false, replies);
    let ticket = client.ask_read(4096, 16)?;
    let mut bytes = vec![0xee; 16];
    client.take_read(ticket, &mut bytes).map(|()| bytes)
}

fn status(replies: &[u8]) -> Result<Vec<Vec<Stretch>>, NbdError> {
    let mut client = client(true, replies);
    let ticket = client.ask_status(4096, 8192)?;
    client.take_status(ticket)
}

#[test]
fn answers_find_their_requests_in_any_order() {
    let replies =
        [data(true, 1, 512, &[2; 8]), data(false, 0, 4, &[1; 4]), chunk(true, 2, 0, &hole(0, 4))]
            .concat();
    let mut client = client(false, &replies);
    let tickets = [client.ask_read(0, 8).unwrap(), client.ask_read(512, 8).unwrap()];
    let (mut first, mut second) = ([9; 8], [9; 8]);
    client.take_read(tickets[0], &mut first).unwrap();
    client.take_read(tickets[1], &mut second).unwrap();
    assert_eq!((first, second), ([0, 0, 0, 0, 1, 1, 1, 1], [2; 8]));
}

fn hole(offset: u64, length: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat()
}

fn stretches(context: u32, of: &[(u32, u32)]) -> Vec<u8> {
    let words = of.iter().flat_map(|(length, flags)| [*length, *flags]);
    [context].into_iter().chain(words).flat_map(u32::to_be_bytes).collect()
}

#[test]
fn a_status_is_cut_at_the_end_of_its_request() {
    let found = status(&chunk(true, 5, 0, &stretches(7, &[(4096, 3), (1 << 30, 0)]))).unwrap();
    let stretch = |offset, length, flags| Stretch { offset, length, flags };
    assert_eq!(found, [[stretch(4096, 4096, 3), stretch(8192, 4096, 0)]]);
}

#[test]
fn a_status_that_lies_is_refused() {
    let lies = [
        stretches(7, &[(0, 0)]),
        stretches(7, &[]),
        stretches(8, &[(4096, 0)]),
        stretches(7, &[(8192, 0), (4096, 0)]),
        [stretches(7, &[(4096, 0)]), vec![1]].concat(),
    ];
    for lie in lies {
        assert!(
            matches!(status(&chunk(true, 5, 0, &lie)), Err(NbdError::Protocol { .. })),
            "{lie:?}"
        );
    }
    let twice = chunk(false, 5, 0, &stretches(7, &[(8192, 0)]));
    assert!(matches!(status(&[&twice[..], &twice].concat()), Err(NbdError::Protocol { .. })));
    assert!(matches!(status(&chunk(true, 0, 0, &[])), Err(NbdError::Protocol { .. })));
}

#[test]
fn a_read_that_lies_is_refused() {
    let short = data(true, 0, 4096, &[1; 15]);
    let long = data(true, 0, 4096, &[1; 17]);
    let before = data(true, 0, 4095, &[1; 16]);
    let behind = data(true, 0, u64::MAX, &[1; 16]);
    let twice = [data(false, 0, 4096, &[1; 16]), data(true, 0, 4096, &[1; 16])].concat();
    let other = data(true, 5, 4096, &[1; 16]);
    let empty = data(true, 0, 4096, &[]);
    let huge_hole = chunk(true, 2, 0, &hole(4096, u32::MAX));
    let magic = vec![0; 20];
    let simple = [&0x6744_6698u32.to_be_bytes()[..], &[0; 12], &[1; 16]].concat();
    for lie in [short, long, before, behind, twice, other, empty, huge_hole, magic, simple] {
        assert!(matches!(read(&lie), Err(NbdError::Protocol { .. })), "{lie:?}");
    }
}

#[test]
fn an_error_names_export_offset_and_number() {
    let words = b"bad sector";
    let payload = [
        &5u32.to_be_bytes()[..],
        &(words.len() as u16).to_be_bytes(),
        words,
        &4100u64.to_be_bytes(),
    ];
    let error = read(&chunk(true, (1 << 15) + 2, 0, &payload.concat())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "export 'disk': cannot read 16 bytes at offset 0x1004: EIO, an input/output error (bad \
         sector)"
    );
    assert!(!error.is_of_connection());
    let simple = [&0x6744_6698u32.to_be_bytes()[..], &108u32.to_be_bytes(), &[0; 8]].concat();
    assert!(read(&simple).unwrap_err().is_of_connection());
}

#[test]
fn an_error_whose_message_is_longer_than_itself_is_refused() {
    let payload = [&5u32.to_be_bytes()[..], &100u16.to_be_bytes(), b"x"].concat();
    assert!(matches!(
        read(&chunk(true, (1 << 15) + 1, 0, &payload)),
        Err(NbdError::Protocol { .. })
    ));
    let announced = [&chunk(true, 1 << 15 | 1, 0, &[])[..16], &u32::MAX.to_be_bytes()].concat();
    assert!(matches!(read(&announced), Err(NbdError::Protocol { .. })));
}

#[test]
fn a_failed_request_leaves_the_others() {
    let failed = [&0x6744_6698u32.to_be_bytes()[..], &5u32.to_be_bytes(), &[0; 8]].concat();
    let mut client = client(false, &[failed, data(true, 1, 0, &[3; 4])].concat());
    let tickets = [client.ask_read(64, 4).unwrap(), client.ask_read(0, 4).unwrap()];
    let mut bytes = [0; 4];
    assert!(client.take_read(tickets[0], &mut bytes).is_err());
    client.take_read(tickets[1], &mut bytes).unwrap();
    assert_eq!(bytes, [3; 4]);
}

#[test]
fn a_server_that_goes_in_the_middle_is_an_error_of_the_connection() {
    let whole = data(true, 0, 4096, &[1; 16]);
    for length in 0..whole.len() {
        assert!(read(&whole[..length]).unwrap_err().is_of_connection(), "{length}");
    }
    assert_eq!(read(&whole).unwrap(), [1; 16]);
}

#[test]
fn a_handshake_that_ends_early_or_refuses_is_an_error() {
    let whole = handshake(false, 1);
    let connect = |words: &[u8], wish: &Wish| Client::over_unix(server(words.to_vec()).0, wish);
    for length in 0..whole.len() {
        assert!(
            matches!(connect(&whole[..length], &Wish::new("disk")), Err(NbdError::Io { .. })),
            "{length}"
        );
    }
    assert!(matches!(
        connect(&handshake(false, 3), &Wish::new("disk").writable()),
        Err(NbdError::Unfit { .. })
    ));
    let greeted = &whole[..18];
    let refused = [greeted, &option_reply(8, 1 << 31 | 1, b"not here")].concat();
    let error = connect(&refused, &Wish::new("disk")).unwrap_err().to_string();
    assert_eq!(error, "the NBD server refuses structured replies for export 'disk': not here");
    let long = [greeted, &option_reply(8, 1, &[])[..16], &u32::MAX.to_be_bytes()].concat();
    assert!(matches!(connect(&long, &Wish::new("disk")), Err(NbdError::Protocol { .. })));
    let other = [greeted, &option_reply(9, 1, &[])].concat();
    assert!(matches!(connect(&other, &Wish::new("disk")), Err(NbdError::Protocol { .. })));
    let endless = [greeted, &option_reply(8, 3, &[]).repeat(1000)].concat();
    assert!(matches!(connect(&endless, &Wish::new("disk")), Err(NbdError::Protocol { .. })));
}

#[test]
fn the_context_must_be_the_one_that_was_asked_for() {
    let wish = Wish::new("disk").with_context("qemu:dirty-bitmap:x");
    let connect = |words: Vec<u8>| Client::over_unix(server(words).0, &wish);
    assert!(matches!(connect(handshake(true, 1)), Err(NbdError::Protocol { .. })));
    let none = [&handshake(false, 1)[..38], &option_reply(10, 1, &[])].concat();
    let error = connect(none).unwrap_err().to_string();
    assert!(error.contains("does not know the context 'qemu:dirty-bitmap:x'"), "{error}");
}

/// Flags and command of the request that `ask` makes of an export with the flags `flags`.
fn request<T>(flags: u16, ask: impl FnOnce(&mut Client) -> T) -> [u8; 4] {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        theirs.write_all(&handshake(false, flags)).unwrap();
        let mut heard = Vec::new();
        theirs.read_to_end(&mut heard).unwrap();
        heard
    });
    let mut client = Client::over_unix(ours, &Wish::new("disk").writable()).unwrap();
    ask(&mut client);
    drop(client);
    let heard = thread.join().unwrap();
    // The last one is the farewell.
    let requests = &heard[heard.len() - 56..];
    assert_eq!(requests[28 + 4..28 + 8], [0, 0, 0, 2]);
    requests[4..8].try_into().unwrap()
}

#[test]
fn zeros_may_become_holes() {
    assert_eq!(request(0b100_0101, |client| client.ask_zeros(4096, 8192).unwrap()), [0, 0, 0, 6]);
}

/// A read that QEMU may answer in parts ends the connection when it fails.
#[test]
fn a_read_is_answered_in_one_part_where_the_server_can() {
    let read = |client: &mut Client| client.ask_read(4096, 8192).unwrap();
    assert_eq!(request(0b1100_0101, read), [0, 4, 0, 0]);
    assert_eq!(request(0b0100_0101, read), [0, 0, 0, 0]);
}

proptest! {
    #[test]
    fn arbitrary_replies_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
        let _ = status(&bytes);
    }

    #[test]
    fn arbitrary_chunks_never_panic(
        kind in prop_oneof![0u16..6, 32768u16..32772],
        done in any::<bool>(),
        payload in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let reply = chunk(done, kind, 0, &payload);
        let _ = read(&reply);
        let _ = status(&reply);
    }

    #[test]
    fn arbitrary_handshakes_never_panic(
        at in 0usize..90,
        bytes in proptest::collection::vec(any::<u8>(), 1..40),
    ) {
        let mut words = handshake(true, 7);
        let end = (at + bytes.len()).min(words.len());
        words.splice(at.min(end)..end, bytes);
        let _ = Client::over_unix(server(words).0, &Wish::new("disk").with_context(ALLOCATION));
    }

    /// An answer that is right but for some of its bytes.
    #[test]
    fn an_answer_with_wrong_bytes_never_panics(
        which in 0usize..6,
        wrong in proptest::collection::vec(
            (any::<prop::sample::Index>(),
                prop_oneof![any::<u8>(), Just(0), Just(0x7f), Just(0xff)]),
            1..4,
        ),
        keep in proptest::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let (code, length) = (5u32.to_be_bytes(), 3u16.to_be_bytes());
        let message = [&code[..], &length, b"bad", &4100u64.to_be_bytes()];
        let mut reply = match which {
            0 => data(true, 0, 4096, &[1; 16]),
            1 => [data(false, 0, 4096, &[1; 8]), chunk(true, 2, 0, &hole(4104, 8))].concat(),
            2 => chunk(true, 5, 0, &stretches(7, &[(4096, 3), (4096, 0)])),
            3 => chunk(true, (1 << 15) + 2, 0, &message.concat()),
            4 => [chunk(false, 5, 0, &stretches(7, &[(8192, 0)])), chunk(true, 0, 0, &[])].concat(),
            _ => [&0x6744_6698u32.to_be_bytes()[..], &5u32.to_be_bytes(), &[0; 8]].concat(),
        };
        for (at, value) in &wrong {
            let at = at.index(reply.len());
            reply[at] = *value;
        }
        if let Some(keep) = keep {
            reply.truncate(keep.index(reply.len()));
        }
        if let Ok(bytes) = read(&reply) {
            prop_assert_eq!(bytes.len(), 16);
        }
        for found in status(&reply).into_iter().flatten().flatten() {
            let end = found.offset + found.length;
            prop_assert!(found.offset >= 4096 && end <= 12288, "{:?}", found);
        }
    }
}
