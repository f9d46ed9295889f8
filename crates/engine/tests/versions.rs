//! Godwits of two releases: the version of the protocol that they have in common, and features.
//!
//! The peers of another release are made up here, byte by byte. That of the release before is
//! tried as a program, too: `lab/e2e/tests/versions.rs`.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_engine::address::{Address, Listener};
use godwit_engine::destination::{self, Notice, Received};
use godwit_engine::handle::MigrationHandle;
use godwit_engine::source::{Options, PostCopy, migrate};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError, Failure, Survivor};
use godwit_units::PageCount;
use godwit_wire::{
    AbortCode, BlockOffer, Feature, Features, FrameHeader, FrameKind, GREETING_LEN, Greeting,
    HEADER_LEN, Message, Offer, Role, Secret, SessionId, Version, WireError, barrier_aux, seal,
};

use machine::{Destination, Source, options};

const SESSION: SessionId = SessionId([7; 16]);
const SECRET: [u8; 32] = [5; 32];

/// A destination for the guest of `source`, in a thread: where it listens, what it tells, and how
/// it ends.
#[allow(clippy::type_complexity, reason = "said above")]
fn receive(
    source: &Source,
    reconnect: Duration,
) -> (Address, Receiver<Notice>, JoinHandle<Result<Received, Failure>>, Cancel) {
    let mut destination = Destination::of(source);
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap();
    let (told_in, told) = channel();
    let cancel = Cancel::default();
    let own = cancel.clone();
    let receiving = std::thread::spawn(move || {
        let options = destination::Options {
            wait: Some(Duration::from_secs(60)),
            reconnect,
            ..destination::Options::default()
        };
        let mut tell = |notice: &Notice| told_in.send(notice.clone()).unwrap();
        destination::receive(&mut destination, &listener, &options, &own, &mut tell)
    });
    (to, told, receiving, cancel)
}

fn connect(to: &Address) -> TcpStream {
    let stream = TcpStream::connect(to.to_string()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn read_greeting(stream: &mut TcpStream) -> Result<Greeting, WireError> {
    let mut bytes = [0; GREETING_LEN];
    stream.read_exact(&mut bytes).unwrap();
    Greeting::decode(&bytes)
}

/// The next message but signs of life.
fn read_message(stream: &mut TcpStream) -> Message {
    loop {
        let mut bytes = [0; HEADER_LEN];
        stream.read_exact(&mut bytes).unwrap();
        let header = FrameHeader::decode(&bytes).unwrap();
        let mut payload = vec![0; header.length];
        stream.read_exact(&mut payload).unwrap();
        match Message::decode(&header, &payload).unwrap() {
            Message::Alive => {}
            message => return message,
        }
    }
}

/// Opens the control connection of a source that speaks `version`.
fn greet(to: &Address, version: Version) -> TcpStream {
    let mut stream = connect(to);
    let greeting = Greeting { version, session: SESSION, role: Role::Control, attempt: 0 };
    stream.write_all(&greeting.encode()).unwrap();
    assert_eq!(read_greeting(&mut stream), Ok(greeting), "it answers in the same version");
    stream
}

/// A greeting whose version is another one, and tells of the `oldest` that its sender speaks.
fn greeting_of(version: u8, oldest: u8) -> [u8; GREETING_LEN] {
    let mut bytes = Greeting::refusal().encode();
    bytes[8] = version;
    bytes[11] = oldest;
    bytes
}

/// A destination that speaks `version` alone, as releases before version 6 do: it answers each
/// greeting of another one with its own, and closes. All others go on to `far`.
fn one_version(version: Version, far: &Address) -> (Address, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = listener.local_addr().unwrap().to_string().parse().unwrap();
    let (refused_in, refused) = channel();
    let far = far.to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut greeting = [0; GREETING_LEN];
            if stream.read_exact(&mut greeting).is_err() {
                continue;
            }
            if u16::from_le_bytes([greeting[8], greeting[9]]) != version.number() {
                let mut refusal = Greeting { version, ..Greeting::refusal() }.encode();
                refusal[11] = 0;
                stream.write_all(&refusal).unwrap();
                refused_in.send(()).unwrap();
                continue;
            }
            let mut far = TcpStream::connect(&far).unwrap();
            far.write_all(&greeting).unwrap();
            let (mut back_from, mut back_to) =
                (far.try_clone().unwrap(), stream.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back_from, &mut back_to);
                let _ = back_to.shutdown(std::net::Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut stream, &mut far);
                let _ = far.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (near, refused)
}

#[test]
fn a_source_speaks_the_version_of_an_older_destination() {
    // Mutations: the refusal ends the migration; a channel greets in the newest version.
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let (far, told, receiving, _) = receive(&source, Duration::ZERO);
    let (to, refused) = one_version(Version::V5, &far);
    let handle = MigrationHandle::default();
    handle.switch_over(true).unwrap();
    let options = Options { to, ..options(3, true) };
    let measures = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap();
    receiving.join().unwrap().unwrap();
    assert_eq!((measures.protocol_version, measures.features.as_str()), (5, "none"));
    assert!(measures.verified && measures.channels == 3);
    assert_eq!(measures.look_back, None, "it cannot read back: all was compared at the stop");
    assert_eq!(refused.try_iter().count(), 1, "one connection, the first, was of version 6");
    assert!(!source.card.kept, "nobody would take its packets");
    let accepted = told.try_iter().find_map(|notice| match notice {
        Notice::Accepted { protocol_version, features, .. } => Some((protocol_version, features)),
        Notice::Refused(why) => panic!("{why}"),
        _ => None,
    });
    assert_eq!(accepted, Some((5, "none".to_owned())));
}

/// What this release has where no copy in a third place is wanted.
fn usual() -> Features {
    Features::HERE.without(Feature::PostCopySafe).without(Feature::Facts)
}

#[test]
fn two_of_the_same_release_speak_the_newest_version() {
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, _told, receiving, _) = receive(&source, Duration::from_secs(5));
    let handle = MigrationHandle::default();
    handle.switch_over(true).unwrap();
    let options = Options { to, ..options(1, false) };
    let measures = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap();
    receiving.join().unwrap().unwrap();
    assert_eq!(measures.protocol_version, Version::NEWEST.number());
    assert_eq!(measures.features, usual().to_string());
}

#[test]
fn a_destination_that_speaks_no_version_of_ours_is_named_with_the_cure() {
    for (answer, theirs) in
        [(greeting_of(4, 0), "version 4"), (greeting_of(8, 7), "versions 7 to 8")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap().to_string().parse().unwrap();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let first = read_greeting(&mut stream).unwrap();
            stream.write_all(&answer).unwrap();
            (first.version, listener)
        });
        let mut source = Source::start(Duration::from_secs(60), Vec::new());
        let handle = MigrationHandle::default();
        let options = Options { to, ..options(1, false) };
        let failure = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap_err();
        let (first, listener) = answering.join().unwrap();
        assert_eq!(first, Version::NEWEST);
        let words = failure.to_string();
        let expected = format!(
            "the peer speaks {theirs} of the protocol and this godwit versions 5 to 6: install \
             the same release on both hosts, or releases that have a version in common"
        );
        assert!(words.contains(&expected), "{words}");
        assert_eq!(failure.survivor, Survivor::Source);
        assert!(source.running.load(std::sync::atomic::Ordering::Relaxed));
        // It does not come back with a version that nobody here speaks.
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
    }
}

#[test]
fn sources_of_other_releases_are_told_our_versions_and_waiting_goes_on() {
    // Mutations: the destination gives up, or answers nothing; one that will be back in a version
    // of ours is told of as if that were a problem.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, told, receiving, cancel) = receive(&source, Duration::ZERO);
    for (version, oldest) in [(4, 0), (8, 7), (7, 6)] {
        let mut stream = connect(&to);
        stream.write_all(&greeting_of(version, oldest)).unwrap();
        let mut answer = [0; GREETING_LEN];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, greeting_of(6, 5), "to version {version}");
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it closes");
    }
    drop(greet(&to, Version::V6));
    cancel.cancel();
    assert!(receiving.join().unwrap().is_err());
    let refused: Vec<_> = told
        .try_iter()
        .filter_map(|notice| match notice {
            Notice::Refused(why) => Some(why),
            _ => None,
        })
        .filter(|why| why.contains("of the protocol"))
        .collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    for (why, theirs) in refused.iter().zip(["version 4", "versions 7 to 8"]) {
        assert!(why.contains(&format!("speaks {theirs} of the protocol")), "{why}");
        assert!(why.contains("this godwit versions 5 to 6: install the same release"), "{why}");
    }
}

/// What `features` of a source that speaks `version` the destination at `to` accepts.
fn accepted(to: &Address, source: &Source, version: Version, features: Features) -> Features {
    accepts(&mut greet(to, version), Message::Inquiry(offer(source, features)))
}

fn offer(source: &Source, features: Features) -> Offer {
    let block = |(name, pages): (&str, PageCount)| BlockOffer { name: name.to_owned(), pages };
    Offer {
        channels: 1,
        codecs: 0,
        features,
        verify: false,
        running: true,
        machine: "made-up".to_owned(),
        blocks: source.ram().iter().map(|it| block((it.name(), it.pages()))).collect(),
        disks: Vec::new(),
    }
}

/// Offers by `message`, and answers questions, until it is accepted with these features.
fn accepts(control: &mut TcpStream, message: Message) -> Features {
    say(control, &message);
    loop {
        match read_message(control) {
            Message::Question(mut question) => {
                question.reverse();
                say(control, &Message::Answer(question));
            }
            Message::Accept { features, .. } => return features,
            // Who asks is told of the host, too.
            Message::Facts(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn say(stream: &mut TcpStream, message: &Message) {
    stream.write_all(&message.encode()).unwrap();
}

/// Another connection of the session.
fn join(to: &Address, role: Role, attempt: u32) -> TcpStream {
    let mut stream = connect(to);
    let greeting = Greeting { version: Version::V6, session: SESSION, role, attempt };
    stream.write_all(&greeting.encode()).unwrap();
    stream
}

/// A source that has told its secret and made a channel comes back, and will make so many; its
/// new control connection.
fn come_back(
    to: &Address,
    mut control: TcpStream,
    mut channel: TcpStream,
    channels: u8,
) -> TcpStream {
    // Told by the answer that the secret has come.
    channel.write_all(&barrier(0)).unwrap();
    say(&mut control, &Message::RoundEnd { round: 0 });
    assert!(matches!(read_message(&mut control), Message::RoundAck { .. }));
    control = join(to, Role::Resume, 1);
    let attempt = 1_u32.to_le_bytes();
    let words: [&[u8]; 5] = [b"godwit", b"resume", &SESSION.0, &attempt, &[channels]];
    let proof = godwit_tls::prove(&SECRET, &words);
    say(&mut control, &Message::Resume { channels, proof });
    read_greeting(&mut control).unwrap();
    assert!(matches!(read_message(&mut control), Message::Resumed { .. }));
    control
}

/// What the destination says at last of a source with these `features` that asks for fingerprints:
/// before it was ever gone, or so many times after it is back.
fn asks_for_prints(features: Features, back: Option<usize>) -> (usize, String) {
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, _told, receiving, cancel) = receive(&source, Duration::from_secs(60));
    let mut control = greet(&to, Version::V6);
    accepts(&mut control, Message::Offer(offer(&source, features)));
    say(&mut control, &Message::Keep(Secret(SECRET)));
    let mut channel = join(&to, Role::Channel(0), 0);
    if back.is_some() {
        control = come_back(&to, control, channel, 1);
        channel = join(&to, Role::Channel(0), 1);
    }
    for _ in 0..back.unwrap_or(1) {
        say(&mut control, &Message::PrintsRequest { disks: false });
    }
    let mut segments = 0;
    let last = loop {
        match read_message(&mut control) {
            Message::Prints { .. } => segments += 1,
            Message::Abort { text, .. } => break text,
            other => panic!("{other:?}"),
        }
        // All of them, for one request.
        if back == Some(1) && segments == segments_of(&source) {
            cancel.cancel();
        }
    };
    drop(channel);
    assert!(receiving.join().unwrap().is_err());
    (segments / segments_of(&source), last)
}

fn segments_of(source: &Source) -> usize {
    source.ram().iter().map(|block| block.pages().0.div_ceil(4096) as usize).sum()
}

fn barrier(round: u32) -> [u8; HEADER_LEN] {
    let mut frame = [0; HEADER_LEN];
    seal(&mut frame, FrameKind::Barrier, 0, barrier_aux(round, false));
    frame
}

#[test]
fn fingerprints_are_told_once_to_a_source_that_is_back_and_has_the_feature() {
    // Mutations: the feature is not looked at; it may ask before it was gone; it may ask twice.
    let out_of_place = |said: &str| said.contains("PrintsRequest out of place");
    let (told, why) = asks_for_prints(usual(), Some(1));
    assert!(told == 1 && why.contains("cancelled"), "{told} {why}");
    for (features, back, expected) in
        [(usual(), None, 0), (Features::NONE, Some(1), 0), (usual(), Some(2), 1)]
    {
        let (told, why) = asks_for_prints(features, back);
        assert!(told == expected && out_of_place(&why), "{features} {back:?}: {told} {why}");
    }
}

#[test]
fn a_packet_for_a_guest_that_does_not_run_here_is_out_of_place() {
    // Mutation: it is delivered wherever it comes.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, _told, receiving, _) = receive(&source, Duration::ZERO);
    let mut control = greet(&to, Version::V6);
    assert!(accepts(&mut control, Message::Offer(offer(&source, usual()))).0 & 1 << 10 != 0);
    let channel = join(&to, Role::Channel(0), 0);
    say(&mut control, &Message::LatePacket(vec![0; 60]));
    let Message::Abort { text, .. } = read_message(&mut control) else { panic!("no abort") };
    assert!(text.contains("LatePacket out of place"), "{text}");
    drop(channel);
    assert!(receiving.join().unwrap().is_err());
}

#[test]
fn a_source_that_gives_up_before_its_channels_are_there_is_heard() {
    // Mutation: who waits for channels does not listen. Then they are what it did without.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    for reconnect in [Duration::ZERO, Duration::from_secs(60)] {
        let (to, _told, receiving, _cancel) = receive(&source, reconnect);
        let mut control = greet(&to, Version::V6);
        let of_two = Offer { channels: 2, ..offer(&source, usual()) };
        accepts(&mut control, Message::Offer(of_two));
        let _one_of_two = join(&to, Role::Channel(0), 0);
        let text = "no userfaultfd here".to_owned();
        say(&mut control, &Message::Abort { code: AbortCode::Other, text });
        let failure = receiving.join().unwrap().unwrap_err();
        assert!(failure.to_string().contains("no userfaultfd here"), "{failure}");
    }
}

#[test]
fn a_source_that_is_lost_before_its_channels_are_there_is_not_waited_for() {
    // Mutation: who waits for channels does not see that. Then it waits for ten seconds in vain.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let all = usual().with(Feature::PostCopyWanted);
    for behind_missing in [false, true] {
        let (to, _told, receiving, _cancel) = receive(&source, Duration::from_secs(60));
        let mut control = greet(&to, Version::V6);
        accepts(&mut control, Message::Offer(offer(&source, all)));
        let channel = behind_missing.then(|| {
            // The guest is about to leave, and the connection for what is waited for is to come.
            let mut channel = join(&to, Role::Channel(0), 0);
            say(&mut control, &Message::Keep(Secret(SECRET)));
            channel.write_all(&barrier(0)).unwrap();
            say(&mut control, &Message::RoundEnd { round: 0 });
            assert!(matches!(read_message(&mut control), Message::RoundAck { .. }));
            say(&mut control, &Message::Prepare);
            assert!(matches!(read_message(&mut control), Message::Prepared));
            for block in 0..source.ram().len() as u32 {
                let last = block + 1 == source.ram().len() as u32;
                say(&mut control, &Message::Missing { block, last, runs: Vec::new() });
            }
            channel
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!receiving.is_finished(), "it waits for a channel");
        let began = Instant::now();
        drop(control);
        let failure = receiving.join().unwrap().unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(matches!(failure.cause, EngineError::Link { .. }), "{failure}");
        assert_eq!(failure.survivor, Survivor::Source);
        drop(channel);
    }
}

#[test]
fn a_source_that_gives_up_while_it_comes_back_is_heard() {
    // Mutation: that the connections were lost stays the reason.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, _told, receiving, _cancel) = receive(&source, Duration::from_secs(60));
    let mut control = greet(&to, Version::V6);
    accepts(&mut control, Message::Offer(offer(&source, usual())));
    say(&mut control, &Message::Keep(Secret(SECRET)));
    let channel = join(&to, Role::Channel(0), 0);
    let mut control = come_back(&to, control, channel, 2);
    let _one_of_two = join(&to, Role::Channel(0), 1);
    let text = "Ctrl-C".to_owned();
    say(&mut control, &Message::Abort { code: AbortCode::Cancelled, text });
    let failure = receiving.join().unwrap().unwrap_err();
    assert!(failure.to_string().contains("Ctrl-C"), "{failure}");
}

#[test]
fn a_session_has_the_features_that_both_have_and_none_in_version_5() {
    // Mutations: the destination says what it has and not what both have; it does not look at the
    // version.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, _told, receiving, cancel) = receive(&source, Duration::from_secs(5));
    let all = Features(u32::MAX).without(Feature::PostCopySafe);
    let here = usual().with(Feature::Facts);
    assert_eq!(accepted(&to, &source, Version::V6, all), here, "unknown bits are left");
    assert_eq!(accepted(&to, &source, Version::V6, Features::NONE), Features::NONE);
    assert_eq!(accepted(&to, &source, Version::V5, all), Features::NONE);
    cancel.cancel();
    assert!(receiving.join().unwrap().is_err());
}

#[test]
fn who_comes_to_stay_is_told_nothing_of_the_host_whatever_it_offers() {
    // Mutation: the feature is part of the session that was offered with a guest.
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, told, receiving, _cancel) = receive(&source, Duration::from_secs(5));
    let mut control = greet(&to, Version::V6);
    let offered = usual().with(Feature::Facts);
    say(&mut control, &Message::Offer(offer(&source, offered)));
    let said = loop {
        match read_message(&mut control) {
            Message::Question(mut question) => {
                question.reverse();
                say(&mut control, &Message::Answer(question));
            }
            said => break said,
        }
    };
    assert!(matches!(said, Message::Accept { features, .. } if features == usual()), "{said:?}");
    let accepted = told.iter().find_map(|notice| match notice {
        Notice::Accepted { features, .. } => Some(features),
        _ => None,
    });
    assert_eq!(accepted, Some(usual().to_string()));
    drop(control);
    assert!(receiving.join().unwrap().is_err());
}

#[test]
fn a_destination_cannot_accept_a_feature_that_was_not_offered() {
    for (version, features) in [
        (Version::V6, Features(!Features::HERE.0)),
        (Version::V6, Features::of(Feature::PostCopySafe)),
        (Version::V5, Features(1)),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to: Address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let answering = std::thread::spawn(move || {
            loop {
                let (mut stream, _) = listener.accept().unwrap();
                let greeting = read_greeting(&mut stream).unwrap();
                if greeting.version != version {
                    let refusal = Greeting { version, ..Greeting::refusal() };
                    stream.write_all(&refusal.encode()).unwrap();
                    continue;
                }
                stream.write_all(&greeting.encode()).unwrap();
                let Message::Offer(offer) = read_message(&mut stream) else { panic!("no offer") };
                let accept = Message::Accept { codecs: 0, features };
                stream.write_all(&accept.encode()).unwrap();
                while !matches!(read_message(&mut stream), Message::Abort { .. }) {}
                return offer.features;
            }
        });
        let mut source = Source::start(Duration::from_secs(60), Vec::new());
        let options = Options { to, ..options(1, false) };
        let handle = MigrationHandle::default();
        let failure = migrate(&mut source, &options, &handle, &mut |_| {}).unwrap_err();
        assert!(failure.to_string().contains("features that were not offered"), "{failure}");
        assert_eq!(failure.survivor, Survivor::Source);
        assert_eq!(answering.join().unwrap(), usual().common(version.features()));
    }
}

#[test]
fn a_guest_stays_whose_destination_knows_of_no_copy_in_a_third_place() {
    // Mutation: what it accepts is not looked at.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to: Address = listener.local_addr().unwrap().to_string().parse().unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let greeting = read_greeting(&mut stream).unwrap();
        stream.write_all(&greeting.encode()).unwrap();
        let Message::Offer(offer) = read_message(&mut stream) else { panic!("no offer") };
        let features = offer.features.without(Feature::PostCopySafe);
        let features = features.without(Feature::PostCopyWanted);
        stream.write_all(&Message::Accept { codecs: 0, features }.encode()).unwrap();
        while !matches!(read_message(&mut stream), Message::Abort { .. }) {}
        offer.features
    });
    let mut source = Source::start(Duration::from_secs(60), Vec::new());
    let directory = std::env::temp_dir().join(format!("godwit-third-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let options = Options {
        to,
        post_copy: PostCopy::Now,
        post_copy_safe: Some(directory.clone()),
        reconnect: Duration::from_secs(5),
        ..options(1, false)
    };
    let failure = migrate(&mut source, &options, &MigrationHandle::default(), &mut |_| {});
    let failure = failure.unwrap_err();
    assert!(failure.to_string().contains("knows of no copy in a third place"), "{failure}");
    assert_eq!(failure.survivor, Survivor::Source);
    assert!(answering.join().unwrap().contains(Feature::PostCopySafe));
    std::fs::remove_dir(&directory).expect("nothing stays there");
}

#[test]
fn all_connections_of_a_session_are_of_one_version() {
    let source = Source::start(Duration::from_secs(60), Vec::new());
    let (to, told, receiving, cancel) = receive(&source, Duration::ZERO);
    let _control = greet(&to, Version::V5);
    for role in [Role::Channel(0), Role::Resume] {
        let mut stream = connect(&to);
        let greeting = Greeting { version: Version::V6, session: SESSION, role, attempt: 1 };
        stream.write_all(&greeting.encode()).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it closes");
    }
    cancel.cancel();
    assert!(receiving.join().unwrap().is_err());
    let other = "a connection of the session, in another version of the protocol";
    let refused = told.try_iter().filter(|it| matches!(it, Notice::Refused(why) if why == other));
    assert_eq!(refused.count(), 2);
}
