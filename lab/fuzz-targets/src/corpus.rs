//! What the other side really says, for each target: where a fuzzer begins.

use godwit_codec::{Codec, CodecId, Compressor};
use godwit_control::messages::Answer;
use godwit_engine::report::{DiskProgress, Measures, Progress, Stage};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun, Rate};
use godwit_wire::{
    AbortCode, BlockOffer, Content, DiskOffer, Facts, Features, Greeting, HEADER_LEN, HugePages,
    Message, NAME_LIMIT, Offer, PROOF_LEN, PageFrameBuilder, RUN_LEN, RUNS_LIMIT, Role, SECRET_LEN,
    Secret, SessionId, Version, barrier_aux, seal,
};
use serde_json::{Value, json};

use crate::guests::{DEVICE, DRIVER, TABLE};

/// An input, and what it is called.
pub type Seed = (&'static str, Vec<u8>);

/// The corpus of the target called `name`; empty where there is none.
///
/// ```
/// assert!(godwit_fuzz_targets::corpus::of("greeting").iter().any(|(name, _)| *name == "control"));
/// ```
#[must_use]
pub fn of(name: &str) -> Vec<Seed> {
    match name {
        "greeting" => greetings(),
        "frames" => frames(),
        "handover" => handovers(),
        "inputs" => inputs(),
        "monitor" => monitors(),
        "machine" => machines(),
        "start" => starts(),
        "domain" => domains(),
        "state" => states(),
        "nbd" => servers(),
        "balloon" => balloons(),
        "rings" => rings(),
        "control" => lines(),
        "keys" => keys(),
        "words" => words(),
        _ => Vec::new(),
    }
}

fn greetings() -> Vec<Seed> {
    let session = SessionId([7; 16]);
    let greeting =
        |role| Greeting { version: Version::NEWEST, session, role, attempt: 0 }.encode().to_vec();
    vec![
        ("control", greeting(Role::Control)),
        ("channel", greeting(Role::Channel(3))),
        ("resolve", greeting(Role::Resolve)),
        (
            "resume",
            Greeting { version: Version::V5, session, role: Role::Resume, attempt: 2 }
                .encode()
                .to_vec(),
        ),
        ("stranger", b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n".to_vec()),
    ]
}

fn offer() -> Offer {
    let block = |name: &str, pages| BlockOffer { name: name.to_owned(), pages: PageCount(pages) };
    Offer {
        channels: 2,
        codecs: 3,
        features: Features(1),
        verify: true,
        running: true,
        machine: "qemu".to_owned(),
        blocks: vec![block("/objects/mem0", 1 << 18), block("vga.vram", 4096)],
        disks: vec![DiskOffer {
            name: "vda".to_owned(),
            size: ByteCount(10 << 30),
            granularity: ByteCount(65536),
        }],
    }
}

fn frames() -> Vec<Seed> {
    let all = |messages: &[Message]| messages.iter().flat_map(Message::encode).collect::<Vec<_>>();
    let abort = Message::Abort { code: AbortCode::Layout, text: "the sizes differ: é".to_owned() };
    let flush = std::time::Duration::from_micros(70);
    let facts = Facts {
        available: ByteCount(3 << 30),
        huge_pages: vec![HugePages { size: ByteCount(2 << 20), total: 512, free: 100 }],
        processor: "CPU".to_owned(),
        flags: "fpu avx2".to_owned(),
        ..Facts::default()
    };
    let destination = [
        Message::Question(b"{\"describe\":\"qemu\"}".to_vec()),
        Message::Accept { codecs: 1, features: Features(1) },
        Message::RoundAck { round: 3, flush },
        Message::Prepared,
        Message::Digests { block: 1, first: 2, digests: vec![3, u128::MAX] },
        Message::Ready,
        Message::Running,
        Message::Discarded,
        Message::Resumed { attempt: 1, placed: vec![3, u64::MAX], proof: [7; PROOF_LEN] },
        Message::Prints { block: 1, segment: 2, prints: vec![3, u64::MAX] },
        Message::Tried { bytes: 3, clock: 7 },
        Message::Wanted { block: 1, pages: vec![PageIndex(3)] },
        Message::Placed,
        Message::Facts(facts),
    ];
    let source = [
        Message::Answer(b"{\"version\":[10,0,2]}".to_vec()),
        Message::Prove { seed: 7 },
        Message::PrintsRequest { disks: true },
        Message::Missing { block: 1, last: true, runs: vec![PageRun::new(3, 4)] },
        Message::Trial(b"filling".to_vec()),
        Message::RoundEnd { round: 3 },
        Message::Prepare,
        Message::DigestRequest,
        Message::DeviceState(b"QEVM\0\0\0\x03".to_vec()),
        Message::DeviceStateEnd,
        Message::Commit,
        Message::LatePacket(vec![0; 24]),
        Message::Farewell,
        Message::Alive,
        Message::Keep(Secret([7; SECRET_LEN])),
        Message::Resume { channels: 2, proof: [7; PROOF_LEN] },
    ];
    let mut barrier = vec![0; HEADER_LEN];
    seal(&mut barrier, godwit_wire::FrameKind::Barrier, 0, barrier_aux(3, true));
    vec![
        ("offer", Message::Offer(offer()).encode()),
        ("inquiry", Message::Inquiry(offer()).encode()),
        ("no-text", no_text()),
        ("abort", abort.encode()),
        ("source", all(&source)),
        ("destination", all(&destination)),
        ("barrier", barrier),
        ("zeros", zeros()),
        ("lz4", compressed(Codec::Lz4 { acceleration: 1 }, CodecId::Lz4)),
        ("zstd", compressed(Codec::Zstd { level: 1 }, CodecId::Zstd)),
    ]
}

/// A name that is not UTF-8: once it became longer than any may be.
fn no_text() -> Vec<u8> {
    let mut offer = offer();
    offer.machine = "m".repeat(NAME_LIMIT);
    let mut frame = Message::Offer(offer).encode();
    let name = HEADER_LEN + 3 + 4 + 2;
    frame[name..name + NAME_LIMIT].fill(0xff);
    frame
}

fn zeros() -> Vec<u8> {
    let mut builder = PageFrameBuilder::new();
    builder.zero(PageRun::new(7, 50));
    builder.zero(PageRun::new(100, 1));
    builder.finish(1).to_vec()
}

/// Two pages that compress well, and a hole.
fn compressed(codec: Codec, number: CodecId) -> Vec<u8> {
    let mut builder = PageFrameBuilder::new();
    let fill = |bytes: &mut [u8]| {
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = (at / 600) as u8 + 1;
        }
        Ok::<(), ()>(())
    };
    let added = builder.add(PageRun::new(5, 2), fill, |_, _| Some(Content::Data));
    assert!(added.is_ok());
    builder.zero(PageRun::new(9, 3));
    let mut out = vec![0; HEADER_LEN + 8192 + RUNS_LIMIT * RUN_LEN];
    let pages = [builder.data()];
    let packed = Compressor::new().compress(codec, &pages, &mut out[HEADER_LEN..]);
    let length = packed.ok().flatten().expect("these pages compress");
    builder.finish_in(&mut out, length, 0, number as u8).to_vec()
}

/// One byte is one thing that happens (`machines.rs`).
fn handovers() -> Vec<Seed> {
    // The source begins, the destination reads, the source reads; a round, and the switchover.
    let begin = [0, 0, 7, 4, 7, 4, 0x1a, 7, 4, 7, 4, 0x1a, 0];
    let state = [0, 0, 7, 7, 7, 7, 2, 4];
    let end = [7, 2, 4, 7];
    let verified = [7, 4, 7, 4, 0, 7, 7, 2, 4];
    let with = |first: u8, parts: &[&[u8]]| {
        let mut bytes = begin.to_vec();
        bytes[0] = first;
        bytes.extend(parts.concat());
        bytes
    };
    vec![
        ("whole", with(0, &[&state, &end])),
        ("verified", with(1, &[&verified, &end])),
        ("commit-lost", with(0, &[&state, &[13, 4, 7, 14, 7, 2, 4]])),
        ("running-lost", with(0, &[&state, &[7, 2, 13, 7, 4, 14, 7, 4]])),
        ("destination-fails", with(0, &[&state, &[7, 12, 4]])),
        ("source-fails", with(0, &[&state[..4], &[11, 7]])),
        // Lost and taken up again behind the first round.
        ("resumed", [&begin[..7], &[13, 4, 7, 14, 7, 4, 7, 4]].concat()),
    ]
}

/// Low half: the source's input; high half: the destination's.
fn inputs() -> Vec<Seed> {
    let whole = [0x00, 0x11, 0x22, 0x45, 0x56, 0x62, 0x75, 0x88, 0x93, 0xaa, 0xab, 0xac];
    let with = |first: u8| [&[first][..], &whole].concat();
    vec![
        ("whole", with(0)),
        ("verified", with(3)),
        ("failed", [&with(2)[..7], &[0xcf]].concat()),
        ("severed", [&with(0)[..3], &[0xae, 0xdf, 0xef]].concat()),
    ]
}

fn monitors() -> Vec<Seed> {
    let line = |value: Value| format!("{value}\n").into_bytes();
    let answer = |id: u32, value: &Value| line(json!({ "return": value, "id": id }));
    let unknown = |id: u32| {
        line(json!({ "error": { "class": "GenericError", "desc": "no such property" }, "id": id }))
    };
    let stamp = json!({ "seconds": 1_700_000_000, "microseconds": 123_456 });
    let event = line(json!({
        "timestamp": stamp, "event": "STOP", "data": { "guest": true },
    }));
    let block = json!([{
        "device": "", "qdev": "/machine/peripheral/disk/virtio-backend",
        "inserted": {
            "node-name": "disk0", "file": "/srv/a.qcow2", "ro": false, "bps": 0,
            "cache": { "direct": true },
            "image": {
                "filename": "/srv/a.qcow2", "format": "qcow2", "virtual-size": 1_073_741_824,
                "format-specific": { "type": "qcow2", "data": { "compat": "1.1" } },
                "backing-image": {
                    "filename": "json:{\"driver\":\"raw\",\"file\":{\"filename\":\"/srv/b\"}}",
                    "format": "raw", "virtual-size": 512,
                },
            },
        },
    }]);
    let cpus = json!([{ "thread-id": 7, "qom-path": "/machine/unattached/device[0]",
                        "props": { "core-id": 0, "socket-id": 0 } }]);
    let words = json!([{ "cpuid-input-eax": 1, "cpuid-register": "EDX", "features": 126_614_527 }]);
    let smp = json!({ "cores": 1, "threads": 1, "sockets": 1, "maxcpus": 1 });
    let ramblock = "              Block Name    PSize              Offset               Used\
                    \r\n pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 \
                    0x0000000010000000\r\n";
    let told: [(u32, Value); 19] = [
        (1, json!({ "status": "running" })),
        (2, json!({})),
        (3, json!([{ "id": "j", "type": "mirror", "status": "running" }])),
        (4, block),
        (5, json!([{ "node-name": "disk0", "stats": { "wr_bytes": 1, "wr_operations": 2 } }])),
        (
            6,
            json!([{ "node-name": "disk0", "cache": { "direct": true },
                     "dirty-bitmaps": [{ "name": "b", "count": 65536 }] }]),
        ),
        (7, json!([{ "id": "e", "type": "nbd" }])),
        (8, json!([{ "label": "m", "filename": "unix:/run/m,server=on" }])),
        (9, json!([{ "id": "m", "size": 4096, "share": true, "prealloc": false }])),
        (10, json!("pc-q35-10.0-machine")),
        (28, json!({ "enabled": false })),
        (29, smp),
        (30, cpus.clone()),
        (31, json!("qemu64-x86_64-cpu")),
        (43, words),
        (44, cpus),
        (45, json!({ "base-memory": 268_435_456 })),
        (
            46,
            json!([{ "type": "dimm", "data": { "addr": 4096, "size": 1, "slot": 0, "node": 0 } }]),
        ),
        (47, json!(ramblock)),
    ];
    let mut whole = event.clone();
    for id in 1..=47 {
        match told.iter().find(|(number, _)| *number == id) {
            Some((_, value)) => whole.extend(answer(id, value)),
            None => whole.extend(unknown(id)),
        }
    }
    whole.extend(answer(48, &json!(QTREE)));
    whole.extend(&event);
    let refused = line(json!({
        "error": { "class": "CommandNotFound", "desc": "The command is not known" }, "id": 1,
    }));
    // Once, the sum of these two ended godwit.
    let most = json!({ "seconds": u64::MAX, "microseconds": u64::MAX });
    let never = line(json!({ "timestamp": most, "event": "STOP" }));
    vec![("machine", whole), ("event", event), ("refused", refused), ("no-clock", never)]
}

const QTREE: &str = "bus: main-system-bus\r\n  type System\r\n  dev: q35-pcihost, id \"\"\r\n    \
    MCFG = 2952790016 (0xb0000000)\r\n    bus: pcie.0\r\n      type PCIE\r\n      dev: \
    virtio-blk-pci, id \"disk\"\r\n        addr = 02.0\r\n        class = 256 (0x100)\r\n        \
    bus: virtio-bus\r\n          type virtio-pci-bus\r\n          dev: virtio-blk-device, id \
    \"\"\r\n            drive = \"d\"\r\n            num-queues = 1 (0x1)\r\n";

/// Two pictures with a NUL between them.
fn machines() -> Vec<Seed> {
    let device =
        |kind: &str| json!({ "kind": kind, "id": "n", "properties": { "mac": "52:54:00" } });
    let picture = |version: [u8; 3], facts: Value, devices: Value| {
        json!({
            "version": version, "facts": facts, "features": { "CPUID 0x1.0 EDX": 126_614_527 },
            "switches": { "pdcm": true }, "devices": devices, "allowed": ["smp"],
        })
    };
    let source = picture(
        [7, 2, 0],
        json!({ "machine": "pc-q35-7.2", "accel": "tcg", "cpu": "qemu64", "smp": "2",
                "memory": "268435456", "memory.block pc.ram": "268435456" }),
        json!({ "02.0": device("virtio-net-pci"), "03.0": device("e1000") }),
    );
    let here = picture(
        [10, 0, 2],
        json!({ "machine": "pc-q35-7.2", "accel": "kvm", "cpu": "max", "smp": "4",
                "memory": "536870912", "cpu.vendor": "AuthenticAMD" }),
        json!({ "02.0": device("virtio-blk-pci"), "04.0": device("VGA") }),
    );
    let pair = |one: &Value, other: &Value| format!("{one}\0{other}").into_bytes();
    let disk = |number: u32, name: &str| {
        json!({
            "disks": [{
                "names": ["vda", "/machine/peripheral/disk"], "size": 1_073_741_824, "moves": false,
                "files": [{ "name": name, "identity": {
                    "host": "b", "file": [1, number], "device": null, "server": "nfs:/srv",
                    "lun": null,
                } }],
            }],
            "shared": false,
        })
    };
    vec![
        ("same", pair(&source, &source)),
        ("differs", pair(&source, &here)),
        ("disks", pair(&disk(1, "/srv/a"), &disk(2, "/srv/a"))),
    ]
}

fn starts() -> Vec<Seed> {
    let told = |words: &[&str]| {
        json!({ "words": words, "directory": "/", "machine": "pc-q35-10.0" }).to_string().into()
    };
    vec![
        (
            "plain",
            told(&[
                "qemu-system-x86_64",
                "-machine",
                "q35",
                "-m",
                "4G",
                "-enable-kvm",
                "-daemonize",
                "-serial",
                "stdio",
                "-append",
                "root=/dev/vda",
                "-kernel",
                "/dev/null",
                "-drive",
                "file=/dev/null,if=virtio,id=a,format=raw",
                "-smp",
                "2",
            ]),
        ),
        (
            "lines",
            told(&[
                "q",
                "-chardev",
                "socket,id=c,path=/nowhere/named/s,server=on,wait=off",
                "-mon",
                "chardev=c,mode=control",
                "-serial",
                "mon:chardev:c",
                "-vnc",
                "unix:/dev/null",
                "-qmp",
                "unix:/nowhere/named/q,server=on",
                "-monitor",
                "none",
            ]),
        ),
        (
            "json",
            told(&[
                "q",
                "-blockdev",
                r#"{"driver":"raw","file":{"driver":"file","filename":"/dev/null"}}"#,
                "-device",
                r#"{"driver":"virtio-blk-pci","drive":"d","bootindex":1}"#,
                "-object",
                r#"{"qom-type":"memory-backend-ram","id":"m","size":4096}"#,
                "-netdev",
                "tap,id=n,script=no,downscript=no",
                "-device",
                "e1000,netdev=n",
            ]),
        ),
        ("empty-path", told(&["q", "-chardev", "socket,id=c,path=,server=on"])),
        (
            "text",
            told(&[
                "q",
                "-smbios",
                "type=1,product=a/b",
                "-fw_cfg",
                "name=opt/a,string=b/c",
                "-global",
                "driver=loader,property=file,value=/dev/null",
            ]),
        ),
    ]
}

fn domains() -> Vec<Seed> {
    let xml = "<domain type='kvm'><name>web</name><devices><disk type='file' device='disk'>\
               <driver name='qemu' type='qcow2'/><source file='/vm/a&amp;b.qcow2' index='2'/>\
               <backingStore/><target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>\
               <disk type='block'><source dev='/dev/vg/b'/><target dev='vdb'/></disk></devices>\
               </domain>";
    let moving = |name: &str| json!({ "name": name, "size": 1_073_741_824, "identity": null });
    let told = |moving: Value, persistent: Option<&str>| {
        json!({
            "name": "web", "uuid": "6a2cb1b5-6b1c-4e8c-a8f4-0f2b0a1c9a11", "xml": xml,
            "persistent": persistent, "autostarts": true, "disks": [], "moving": moving,
            "disks_are_shared": false,
        })
        .to_string()
        .into_bytes()
    };
    vec![
        ("stays", told(json!([]), None)),
        ("moves", told(json!([moving("vda"), moving("vdb")]), Some(xml))),
    ]
}

fn states() -> Vec<Seed> {
    let settings = "# Machine\n[machine]\ntype = \"q35\"\n\n[memory]\nsize = \"1024M\"\n\n[chardev \
                    \"monitor\"]\nbackend = \"socket\"\npath = \"/run/a,b\"\nserver = \"on\"\n";
    vec![
        (
            "devices",
            b"\0QEVM\0\0\0\x03\x04\0\0\0\x01\x05timer\0\0\0\0\0\0\0\x02rest\x7e\0".to_vec(),
        ),
        ("settings", [b"\x01", settings.as_bytes()].concat()),
    ]
}

/// NBD, as its specification has it (doc/proto.md).
fn servers() -> Vec<Seed> {
    const SIZE: u64 = 1 << 20;
    const FLAGS: u16 = 0b1100_0101;
    let option = |option: u32, kind: u32, data: &[u8]| {
        let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
        let length = (data.len() as u32).to_be_bytes();
        [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length, data].concat()
    };
    let handshake = |contexts: bool| {
        let mut said = vec![contexts.into()];
        said.extend(b"NBDMAGICIHAVEOPT\0\x03");
        said.extend(option(8, 1, &[]));
        if contexts {
            said.extend(option(10, 4, b"\0\0\0\x07base:allocation"));
            said.extend(option(10, 1, &[]));
        }
        let export = [&[0, 0][..], &SIZE.to_be_bytes(), &FLAGS.to_be_bytes()].concat();
        said.extend(option(7, 3, &export));
        said.extend(option(7, 1, &[]));
        said
    };
    let chunk = |kind: u16, cookie: u64, payload: &[u8]| {
        let head = [&0x668e_33ef_u32.to_be_bytes()[..], &[0, 1], &kind.to_be_bytes()].concat();
        let length = (payload.len() as u32).to_be_bytes();
        [&head[..], &cookie.to_be_bytes(), &length, payload].concat()
    };
    let hole = chunk(2, 0, &[&[0; 8][..], &4096_u32.to_be_bytes()].concat());
    let words =
        |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>();
    let status = chunk(5, 2, &words(&[7, 1024, 3, 3072, 0]));
    let flushed = [&words(&[0x6744_6698, 0])[..], &1_u64.to_be_bytes()].concat();
    let failed =
        chunk(0x8002, 0, &[b"\0\0\0\x05\0\x03bad".as_slice(), &7_u64.to_be_bytes()].concat());
    let refused = [&handshake(false)[..19], &option(8, 0x8000_0001, b"not here")].concat();
    vec![
        ("plain", [&handshake(false)[..], &hole, &flushed].concat()),
        ("contexts", [&handshake(true)[..], &hole, &flushed, &status].concat()),
        ("failed", [&handshake(false)[..], &failed].concat()),
        ("refused", refused),
    ]
}

/// Bytes for guest memory (`guests.rs`).
fn put(at: u32, bytes: &[u8]) -> Vec<u8> {
    let place = ((at - TABLE) / 2) as u16;
    [&[2][..], &place.to_le_bytes(), &[bytes.len() as u8], bytes].concat()
}

/// A descriptor and its place in the ring of `queue`, which it makes available.
fn request(queue: u32, address: u64, length: u32, writes: bool, number: u16) -> Vec<u8> {
    let offset = queue * 0x200;
    let flags = if writes { 2_u16 } else { 0 };
    let descriptor =
        [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &[0, 0]].concat();
    [
        put(TABLE + offset, &descriptor),
        put(DRIVER + offset + 4 + 2 * u32::from(number - 1), &[0, 0]),
        put(DRIVER + offset + 2, &number.to_le_bytes()),
    ]
    .concat()
}

fn balloons() -> Vec<Seed> {
    const DATA: u32 = DEVICE + 0x1000;
    let notify = |queue: u8| vec![6, queue];
    let frames: Vec<u8> = [7_u32, 8, 9, 99, 100].iter().flat_map(|it| it.to_le_bytes()).collect();
    let inflate = [put(DATA, &frames), request(0, DATA.into(), 20, false, 1), notify(0)].concat();
    let hint = [
        vec![10],
        put(DATA, &2_u32.to_le_bytes()),
        request(3, DATA.into(), 4, false, 1),
        notify(3),
        request(3, 98 << 12, 4 << 12, true, 2),
        notify(3),
        vec![12],
    ]
    .concat();
    let statistics = [
        put(DATA, &[4, 0, 0, 0, 0, 0, 0, 1, 0, 0]),
        request(2, DATA.into(), 10, false, 1),
        notify(2),
        vec![13, 14, 13],
    ]
    .concat();
    let report = [request(4, 90 << 12, 16 << 12, true, 1), notify(4)].concat();
    let reset = [[0, 7].to_vec(), 0_u32.to_le_bytes().to_vec(), inflate.clone()].concat();
    vec![
        ("inflate", inflate),
        ("hint", hint),
        ("statistics", statistics),
        ("report", report),
        ("reset", reset),
    ]
}

fn rings() -> Vec<Seed> {
    let one = [request(1, 0x8000, 4, true, 1), vec![5, 1]].concat();
    let moved = [&one[..], &[7, 6], &0_u64.to_le_bytes(), &[5, 1]].concat();
    let register = [&[0, 3][..], &1_u32.to_le_bytes(), &[0, 4], &8_u32.to_le_bytes()].concat();
    vec![("request", one), ("moved", moved), ("registers", register)]
}

fn lines() -> Vec<Seed> {
    let requests = [
        json!({ "command": "status" }),
        json!({ "command": "set", "settings": [["max-bandwidth", "1Gbit"], ["throttle", "off"]] }),
        json!({ "command": "switch-over", "force": true }),
        json!({ "command": "migrate", "to": "[::1]:7000", "settings": [["patience", "5s"]],
                "verify": true, "channels": 2, "keep_source": false, "disks": "vda,vdb",
                "disk_granularity": 65536, "security": { "insecure": true } }),
        json!({ "command": "receive", "listen": "[::1]:0", "wait_ms": null }),
        json!({ "command": "plug", "bytes": 4096, "slots": 3 }),
    ];
    let daemon = [
        json!({ "version": 1, "command": "receive", "id": "a-1", "way": "libvirt",
                "vm": { "name": "a", "memory_bytes": 4096, "cpu": "EPYC" } }),
        json!({ "version": 1, "command": "follow", "id": "a-1", "from": 3 }),
        json!({ "answer": "said", "n": 1, "line": { "event": "listening" } }),
    ];
    let progress = Progress {
        elapsed: std::time::Duration::from_millis(4321),
        stage: Stage::PreCopy,
        round: 3,
        round_ended: true,
        sent: ByteCount(1 << 30),
        remaining: ByteCount(1 << 24),
        dirty_rate: Some(Rate::from_bytes_per_second(5e6)),
        bandwidth: Some(Rate::from_bytes_per_second(1e8)),
        expected_downtime: Some(std::time::Duration::from_millis(7)),
        remaining_time: None,
        throttle: 0.5,
        dirty_rate_limit: Some(1000.0),
        guest_speed: Some(0.5),
        delayed_segments: 2,
        disks: vec![DiskProgress {
            name: "vda".to_owned(),
            size: ByteCount(1 << 30),
            sent: ByteCount(1 << 29),
            remaining: ByteCount(1 << 29),
            full_pass: true,
        }],
        memory_share: 512,
        disk_limit: Some(Rate::from_bytes_per_second(1e6)),
        advice: Some("more".to_owned()),
        warning: Some("slow".to_owned()),
        severed: None,
    };
    let measures = Box::new(Measures::default());
    let json = |answer: &Answer| serde_json::to_value(answer).unwrap_or_default();
    let answers = [
        json!({ "answer": "notice", "notice": "refused", "why": "who\u{1b}[2J" }),
        json!({ "answer": "failed", "phase": "pre-copy", "survivor": "source", "cancelled": false,
                "error": "the link" }),
        json!({ "answer": "migration", "vm": "vm1", "to": "h:1", "progress": null,
                "settings": [["throttle", "off"]] }),
        json(&Answer::Migrated { measures, cost: Default::default() }),
    ];
    let text = |values: &[Value]| {
        values.iter().map(|it| format!("{it}\n")).collect::<String>().into_bytes()
    };
    vec![
        ("requests", text(&requests)),
        ("answers", text(&answers)),
        ("progress", text(&[json(&Answer::Progress(Box::new(progress)))])),
        ("daemon", text(&daemon)),
    ]
}

/// The first byte says what is listened to (`keys.rs`).
fn keys() -> Vec<Seed> {
    // Version 1.3, its suite of 128 bits, its curve, its signatures: all that a greeting needs
    // (RFC 8446, section 4.1.2).
    let extension = |kind: u16, data: &[u8]| {
        [&kind.to_be_bytes()[..], &(data.len() as u16).to_be_bytes(), data].concat()
    };
    let share = [&[0, 36, 0, 0x1d, 0, 32][..], &[9; 32]].concat();
    let extensions = [
        extension(43, &[2, 3, 4]),
        extension(10, &[0, 2, 0, 0x1d]),
        extension(13, &[0, 6, 4, 3, 8, 4, 8, 7]),
        extension(51, &share),
    ]
    .concat();
    let hello = [
        &[3, 3][..],
        &[0; 32],
        &[0],
        &[0, 2, 0x13, 1],
        &[1, 0],
        &(extensions.len() as u16).to_be_bytes(),
        &extensions,
    ]
    .concat();
    let message = [&[1, 0][..], &(hello.len() as u16).to_be_bytes(), &hello].concat();
    let record = [&[2, 0x16, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat();
    vec![
        ("as-they-are", vec![0]),
        ("without-an-end", vec![0, 1, 200, 0, 255, 0]),
        ("another-line", b"\0\x02\x20\0\x02\x08-----END".to_vec()),
        ("no-list", b"\x01-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n".to_vec()),
        ("hello", record),
        ("alert", b"\x03\x15\x03\x03\0\x02\x02\x30".to_vec()),
    ]
}

fn words() -> Vec<Seed> {
    let lines = [
        "64KiB",
        "1.5GiB",
        "10Gbit",
        "128MiB/s",
        "5min",
        "300ms",
        "[::1]:7000",
        "unix:/run/g",
        "vsock:3:4444",
        "host:1",
        "all",
        "vda,vdb",
        "/srv=/mnt/srv",
        "downtime-limit=300ms",
        "max-bandwidth=1Gbit",
        "throttle=adaptive",
        "compression=zstd:3",
        "patience=60s",
    ];
    vec![("lines", lines.join("\n").into_bytes()), ("size", b"18446744073709551615B".to_vec())]
}
