//! What stands against a migration, asked of a stand-in that answers as a QEMU with such devices
//! would: most of them the host of a test has not got.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::monitor::stand_in::{REFUSED, StandIn};

/// A machine whose monitor gives these answers, by command, command line or path, and empty ones
/// else.
fn machine(answers: &[(&str, Value)]) -> Machine {
    Machine::behind(Box::new(StandIn::new(answers))).unwrap()
}

fn with_device(kind: &str) -> String {
    let children = json!([{ "name": "net1", "type": format!("child<{kind}>") },
        { "name": "type", "type": "string" }]);
    let mut machine = machine(&[("/machine/peripheral", children)]);
    machine.check_source().map_or_else(|error| error.to_string(), |_| "fine".to_owned())
}

#[test]
fn devices_that_write_behind_the_page_tables_are_refused() {
    for kind in [
        "vfio-pci",
        "vfio-pci-nohotplug",
        "vhost-vdpa-device-pci",
        "vhost-scsi-pci",
        "scsi-generic",
        "scsi-block",
    ] {
        let told = with_device(kind);
        assert!(told.contains("writes guest memory behind the page tables"), "{kind}: {told}");
        assert!(told.contains(&format!("device 'net1' ({kind})")), "{told}");
    }
    for kind in ["virtio-net-pci", "scsi-hd", "vhost-vsock-pci"] {
        assert_eq!(with_device(kind), "fine", "{kind}");
    }
}

#[test]
fn vhost_user_devices_are_found_wherever_they_are() {
    let device = |name: &str, kind: &str| {
        let kind = format!("child<{kind}>");
        json!({ "name": name, "type": kind })
    };
    let told = |iommu: bool| {
        let devices = json!([device("vb0", "vhost-user-blk-pci"), device("n0", "virtio-net-pci")]);
        let answers = [
            ("/machine/peripheral", devices),
            ("/machine/peripheral/vb0", json!("char0")),
            ("/machine/peripheral/n0", json!("net0")),
            ("info network", json!(" \\ net0: index=0,type=vhost-user,vhost-user0 to char1")),
            (
                "query-chardev",
                json!([{ "label": "char0", "filename": "unix:/run/a" },
                    { "label": "char1", "filename": "disconnected:unix:/run/b,server=on" }]),
            ),
            (
                "x-query-virtio",
                json!([{ "path": "/machine/peripheral/n0/virtio-backend" },
                    { "path": "/machine/peripheral/vb0/virtio-backend" }]),
            ),
            ("/machine/peripheral/vb0/virtio-backend iommu_platform", json!(iommu)),
            ("/machine/peripheral/n0/virtio-backend iommu_platform", json!(false)),
        ];
        let found = machine(&answers).check_source();
        found.map(|found| {
            let words = |front: &Front| format!("{front} {} {}", front.listens, front.connected);
            found.fronts.iter().map(words).collect::<Vec<_>>().join("; ")
        })
    };
    let found = told(false).unwrap();
    assert_eq!(found, "vhost-user-blk 'vb0' false true; vhost-user-net 'net0' true false");
    let refused = told(true).unwrap_err().to_string();
    assert!(refused.contains("vhost-user-blk 'vb0'") && refused.contains("IOMMU"), "{refused}");
    // Where QEMU does not tell of queues.
    let devices = json!([device("vb0", "vhost-user-blk-pci")]);
    let answers = [
        ("/machine/peripheral", devices),
        ("/machine/peripheral/vb0", json!("char0")),
        ("x-query-virtio", json!([])),
    ];
    let refused = machine(&answers).check_source().unwrap_err().to_string();
    assert!(refused.contains("does not tell of its queues"), "{refused}");
    let plain = json!(" \\ net0: index=0,type=user,net=10.0.2.0,restrict=off");
    assert_eq!(machine(&[("info network", plain)]).check_source().unwrap(), Seen::default());
}

#[test]
fn what_writes_memory_unseen_is_known_by_the_file_that_is_open() {
    for file in ["/dev/vfio/12", "/dev/vhost-vdpa-0", "/dev/mshv", "/dev/xen/privcmd"] {
        assert!(writes_unseen(file), "{file}");
    }
    for file in
        ["/dev/kvm", "anon_inode:kvm-vm", "/dev/vhost-net", "/srv/dev/mshv.raw", "/dev/null"]
    {
        assert!(!writes_unseen(file), "{file}");
    }
}

#[test]
fn a_look_at_a_source_asks_each_question_once_and_tells_of_drives() {
    // Mutations: devices or drives are asked for once more, only nodes or only drives are looked at
    // for direct I/O, or images are left out of what the destination must have.
    let look = |at_drive: bool, at_node: bool| {
        let cache =
            |direct: bool| json!({ "direct": direct, "writeback": true, "no-flush": false });
        let medium = json!({ "file": "/srv/a.raw", "ro": false, "cache": cache(at_drive),
            "image": { "filename": "/srv/a.raw", "format": "raw", "virtual-size": 4096 } });
        let node = json!([{ "node-name": "n", "drv": "raw", "cache": cache(at_node) }]);
        let answers = [
            ("/machine/peripheral", json!([{ "name": "d", "type": "child<virtio-blk-pci>" }])),
            ("query-block", json!([{ "device": "a", "qdev": "d", "inserted": medium }])),
            ("query-named-block-nodes", node),
        ];
        let stand_in = StandIn::new(&answers);
        let told = Arc::clone(&stand_in.told);
        let seen = Machine::behind(Box::new(stand_in)).unwrap().check_source().unwrap();
        let asked: Vec<String> =
            told.lock().unwrap().iter().map(|(command, of)| format!("{command} {of}")).collect();
        let once: BTreeSet<_> = asked.iter().collect();
        assert_eq!(once.len(), asked.len(), "{asked:?}");
        seen
    };
    let parts = ["device 'd' (virtio-blk-pci)", "image /srv/a.raw of drive 'a'"];
    assert_eq!(look(false, false).parts, parts.map(str::to_owned).into());
    let direct = |at_drive, at_node| look(at_drive, at_node).direct_io;
    assert!(direct(true, false) && direct(false, true) && !direct(false, false));
}

#[test]
fn who_sends_what_is_missing_looks_at_no_image() {
    // Mutation: `check_memory` asks for drives, as `check_source` does: QEMU looks at their images
    // then, and the storage may be gone.
    let stand_in = StandIn::new(&[]);
    let told = Arc::clone(&stand_in.told);
    Machine::behind(Box::new(stand_in)).unwrap().check_memory().unwrap();
    let told = told.lock().unwrap();
    assert!(!told.iter().any(|(command, _)| command.contains("block")), "{told:?}");
}

#[test]
fn a_qemu_that_would_end_for_it_is_not_asked_of_a_file_system() {
    let asked = |version, answer: Value| {
        let devices = json!([{ "name": "fs", "type": "child<vhost-user-fs-pci>" }]);
        let device = "/machine/peripheral/fs/virtio-backend";
        let iommu = format!("{device} iommu_platform");
        let answers = [
            ("/machine/peripheral", devices),
            ("/machine/peripheral/fs", json!("char0")),
            ("x-query-virtio", json!([{ "path": device }])),
            (iommu.as_str(), json!(false)),
            (device, answer),
        ];
        let stand_in = StandIn::new(&answers).of_version(version);
        let told = Arc::clone(&stand_in.told);
        let found = Machine::behind(Box::new(stand_in)).unwrap().check_source();
        let told = told.lock().unwrap();
        let asked = told.iter().any(|(command, _)| command == "x-query-virtio-status");
        (found.map(|found| found.fronts.len()).map_err(|error| error.to_string()), asked)
    };
    let features =
        |name: &str| json!({ "vhost-dev": { "protocol-features": { "protocols": [name] } } });
    let state = "VHOST_USER_PROTOCOL_F_DEVICE_STATE: moves";
    assert_eq!(asked((10, 0, 2), features(state)), (Ok(1), true));
    let (found, _) = asked((10, 0, 2), features("VHOST_USER_PROTOCOL_F_MQ: many"));
    assert!(found.unwrap_err().contains("would be lost"));
    let (found, asked) = asked((11, 1, 2), features(state));
    assert!(!asked && found.unwrap_err().contains("cannot be asked of this version"));
}

#[test]
fn a_guest_that_runs_guests_under_kvm_is_refused() {
    let told = |kvm: bool, registers: &str| {
        let answers =
            [("query-kvm", json!({ "enabled": kvm })), ("info registers -a", json!(registers))];
        machine(&answers)
            .check_nested()
            .map_or_else(|error| error.to_string(), |()| "fine".to_owned())
    };
    let registers = |cr4: &str, efer: &str| {
        format!("CPU#0\r\nCR0=80050033 CR2=0 CR3=0000000002a0a000 CR4={cr4}\r\nEFER={efer}\r\n")
    };
    let (off, vmx) =
        (registers("000006f0", "0000000000000d01"), registers("000026f0", "0000000000000d01"));
    let svm = registers("000006f0", "0000000000001d01");
    assert_eq!(told(true, &off), "fine");
    assert!(told(true, &format!("{off}{vmx}")).contains("may run guests of its own (VMX is on)"));
    assert!(told(true, &svm).contains("SVM is on"));
    // TCG writes the memory of a guest's guests as it writes all memory.
    assert_eq!(told(false, &svm), "fine");
}

#[test]
fn registers_are_looked_at_only_where_the_processor_may_run_guests() {
    let asked = |vmx: bool, svm: bool| {
        let cpu = json!({ "thread-id": 1, "qom-path": "/cpu" });
        let answers = [
            ("query-kvm", json!({ "enabled": true })),
            ("query-cpus-fast", json!([cpu])),
            ("/cpu vmx", json!(vmx)),
            ("/cpu svm", json!(svm)),
            ("info registers -a", json!("CR4=000026f0 EFER=0000000000001d01")),
        ];
        let refused = machine(&answers).check_nested().is_err();
        (machine(&answers).may_nest().unwrap(), refused)
    };
    assert_eq!([asked(true, false), asked(false, true)], [(true, true); 2]);
    // What its CPUID lacks KVM lets no guest turn on.
    assert_eq!(asked(false, false), (false, false));
}

#[test]
fn work_on_the_images_is_refused() {
    let job = |status: &str| json!([{ "id": "backup0", "type": "backup", "status": status }]);
    let told = |status| {
        machine(&[("query-jobs", job(status))])
            .check_source()
            .map(drop)
            .map_err(|error| error.to_string())
    };
    assert!(told("running").unwrap_err().contains("a block job ('backup0', backup) runs"));
    assert!(told("concluded").is_ok());
}

#[test]
fn a_back_end_of_a_device_is_no_qemu() {
    let writer = |command: &str| Mapper {
        // No such process: known by its command name alone.
        pid: i32::MAX,
        command: command.to_owned(),
        block: "mem".to_owned(),
    };
    assert!(is_vmm(&writer("qemu-system-x86")));
    assert!(is_vmm(&writer("qemu-kvm")));
    assert!(!is_vmm(&writer("virtiofsd")));
}

#[test]
fn what_a_guest_runs_on_is_asked_of_every_qemu() {
    let asked = |answers: &[(&str, Value)]| {
        let mut qmp = StandIn::new(answers);
        runs_on_kvm(&mut qmp).unwrap()
    };
    let on = |name: &str| json!({ "enabled": name, "present": ["tcg", "kvm"] });
    assert!(asked(&[("query-kvm", json!({ "enabled": true, "present": true }))]));
    assert!(!asked(&[
        ("query-kvm", json!({ "enabled": false, "present": true })),
        ("query-accelerators", on("kvm")),
    ]));
    // One without the old command, which is deprecated.
    let without = ("query-kvm", json!({ REFUSED: "The command query-kvm has not been found" }));
    assert!(asked(&[without.clone(), ("query-accelerators", on("kvm"))]));
    assert!(!asked(&[without, ("query-accelerators", on("tcg"))]));
}
