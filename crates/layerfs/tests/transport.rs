//! The FUSE transport against the real kernel.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "tests; error numbers are compared, which fs_err hides"
)]

use std::io::{BufRead as _, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use layerpack_fixtures::{ChildGuard, MountGuard, ScratchDir, is_root, skip};
use layerpack_layerfs::fuse::{
    BlobAttr, BlobSource, Errno, Negotiated, OpenMode, ReplyBuf, Session, SessionConfig,
};
use layerpack_sys::{fusedev, mount};

const LONG: Duration = Duration::from_secs(60);

/// Byte of a blob at an offset: no two pages are equal.
fn pattern(ino: u64, offset: u64) -> u8 {
    let x = (offset ^ (ino << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 29) as u8 ^ (offset >> 12) as u8
}

fn fill(ino: u64, offset: u64, bytes: &mut [u8]) {
    for (at, byte) in (offset..).zip(bytes) {
        *byte = pattern(ino, at);
    }
}

fn expected(ino: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(ino, offset, &mut bytes);
    bytes
}

/// Blobs whose reads can be made to wait, to fail and to panic.
struct Patterns {
    blobs: Vec<(&'static str, u64, u64)>,
    mode: OpenMode,
    opens: AtomicU64,
    longest: AtomicU64,
    gate: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicU64,
}

/// Opens the gate also when a test fails: a reader in this process could not be killed.
struct GateGuard(Arc<Patterns>);

impl Drop for GateGuard {
    fn drop(&mut self) {
        self.0.open_gate();
    }
}

/// At once; through the pool; waits for the gate; fails; panics in the pool; panics at once.
const QUICK: u64 = 10;
const POOLED: u64 = 11;
const GATED: u64 = 12;
const BROKEN: u64 = 13;
const PANICS: u64 = 14;
const PANICS_AT_ONCE: u64 = 15;
const SIZE: u64 = (5 << 20) + 1234;

impl Patterns {
    fn new(mode: OpenMode) -> Arc<Self> {
        Arc::new(Self {
            blobs: vec![
                ("broken", BROKEN, SIZE),
                ("empty", 16, 0),
                ("gated", GATED, SIZE),
                ("huge", 17, 1 << 43),
                ("panics", PANICS, SIZE),
                ("panics-at-once", PANICS_AT_ONCE, SIZE),
                ("pooled", POOLED, SIZE),
                ("quick", QUICK, SIZE),
            ],
            mode,
            opens: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            gate: Mutex::new(false),
            opened: Condvar::new(),
            waiting: AtomicU64::new(0),
        })
    }

    fn open_gate(&self) {
        *self.gate.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn bytes(&self, ino: u64, offset: u64, len: usize, buf: &mut ReplyBuf) {
        let size = self.attr(ino).unwrap().size;
        let len = len.min(size.saturating_sub(offset) as usize);
        self.longest.fetch_max(len as u64, Ordering::Relaxed);
        fill(ino, offset, buf.fill(len));
    }
}

impl BlobSource for Patterns {
    fn lookup(&self, name: &[u8]) -> Option<BlobAttr> {
        let found = self.blobs.iter().find(|(n, _, _)| n.as_bytes() == name)?;
        self.attr(found.1)
    }
    fn attr(&self, ino: u64) -> Option<BlobAttr> {
        let (_, ino, size) = *self.blobs.iter().find(|(_, i, _)| *i == ino)?;
        Some(BlobAttr {
            ino,
            size,
            held: size / 2,
        })
    }
    fn list(&self) -> Vec<(Vec<u8>, BlobAttr)> {
        let all = self.blobs.iter();
        all.map(|(n, i, _)| (n.as_bytes().to_vec(), self.attr(*i).unwrap()))
            .collect()
    }
    fn open(&self, _ino: u64) -> Result<OpenMode, Errno> {
        self.opens.fetch_add(1, Ordering::SeqCst);
        Ok(self.mode)
    }
    fn release(&self, _ino: u64) {
        self.opens.fetch_sub(1, Ordering::SeqCst);
    }
    fn try_read(
        &self,
        ino: u64,
        offset: u64,
        len: usize,
        buf: &mut ReplyBuf,
    ) -> Option<Result<(), Errno>> {
        match ino {
            POOLED | GATED | BROKEN | PANICS => None,
            PANICS_AT_ONCE => panic!("on purpose"),
            _ => {
                self.bytes(ino, offset, len, buf);
                Some(Ok(()))
            }
        }
    }
    fn read(&self, ino: u64, offset: u64, len: usize, buf: &mut ReplyBuf) -> Result<(), Errno> {
        match ino {
            BROKEN => return Err(Errno::TIMEDOUT),
            PANICS => panic!("on purpose"),
            GATED => {
                self.waiting.fetch_add(1, Ordering::SeqCst);
                let mut open = self.gate.lock().unwrap();
                while !*open {
                    open = self.opened.wait(open).unwrap();
                }
            }
            _ => {}
        }
        self.bytes(ino, offset, len, buf);
        Ok(())
    }
}

struct Served {
    source: Arc<Patterns>,
    session: Option<Session>,
    guard: Option<MountGuard>,
    scratch: ScratchDir,
}

impl Served {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.scratch.join("mnt").join(name)
    }

    /// Unmounts and checks that every thread ends.
    fn end(mut self) {
        // The kernel tells of the last close a little later, and not at all after unmount.
        let end = Instant::now() + LONG;
        while self.source.opens.load(Ordering::SeqCst) != 0 {
            assert!(Instant::now() < end, "an open was never released");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.guard.take().unwrap().unmount().unwrap();
        assert!(self.session.take().unwrap().wait(LONG), "threads remain");
    }
}

/// A mounted connection and all its descriptors.
fn mount_at(target: &Path, channels: usize) -> (OwnedFd, Vec<OwnedFd>) {
    std::fs::create_dir_all(target).unwrap();
    let device = fusedev::open().unwrap();
    let fd = mount::fuse(device.as_fd(), false, 1 << 20, "layerpack-test").unwrap();
    let mut all: Vec<OwnedFd> = (1..channels)
        .map(|_| fusedev::clone(device.as_fd()).unwrap())
        .collect();
    all.push(device);
    (fd, all)
}

fn serve(mode: OpenMode, channels: usize) -> Served {
    let scratch = ScratchDir::new("transport").unwrap();
    let source = Patterns::new(mode);
    let target = scratch.join("mnt");
    let (fd, all) = mount_at(&target, channels);
    let session = Session::start(all, SessionConfig::RECOMMENDED, source.clone()).unwrap();
    mount::attach(fd.as_fd(), &target).unwrap();
    drop(fd);
    Served {
        source,
        session: Some(session),
        guard: Some(MountGuard::new(target)),
        scratch,
    }
}

fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

#[test]
fn privileged_reads_give_the_sources_bytes() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    for (mode, channels) in [
        (OpenMode::Cached, 1),
        (OpenMode::Cached, 4),
        (OpenMode::Direct, 4),
    ] {
        let served = serve(mode, channels);
        for (name, ino) in [("quick", QUICK), ("pooled", POOLED)] {
            let whole = std::fs::read(served.path(name)).unwrap();
            assert!(whole == expected(ino, 0, SIZE as usize), "{name} {mode:?}");
            let file = std::fs::File::open(served.path(name)).unwrap();
            for (offset, len) in [
                (0, 1),
                (4095, 2),
                (SIZE - 1, 1),
                (1 << 20, 1 << 20),
                (12_345, 777_777),
            ] {
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, offset).unwrap();
                assert!(bytes == expected(ino, offset, len), "{name} {offset} {len}");
            }
            let mut none = [0; 10];
            assert_eq!(file.read_at(&mut none, SIZE).unwrap(), 0);
            assert_eq!(file.read_at(&mut none, SIZE - 4).unwrap(), 4);
        }
        assert_eq!(std::fs::read(served.path("empty")).unwrap(), b"");
        let huge = std::fs::File::open(served.path("huge")).unwrap();
        let mut bytes = vec![0; 100_000];
        huge.read_exact_at(&mut bytes, (1 << 43) - 100_000).unwrap();
        assert!(bytes == expected(17, (1 << 43) - 100_000, 100_000));
        drop(huge);
        assert!(served.source.longest.load(Ordering::Relaxed) <= 1 << 20);
        let negotiated = served.session.as_ref().unwrap().negotiated().unwrap();
        assert!(negotiated.minor >= 23);
        served.end();
    }
}

#[test]
fn privileged_many_readers_at_once() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let served = serve(OpenMode::Direct, 3);
    std::thread::scope(|scope| {
        for thread in 0..16_u64 {
            let path = served.path(if thread % 2 == 0 { "quick" } else { "pooled" });
            scope.spawn(move || {
                let ino = if thread % 2 == 0 { QUICK } else { POOLED };
                let file = std::fs::File::open(path).unwrap();
                for round in 0..60_u64 {
                    let offset = (thread * 7919 + round * 104_729) % (SIZE - 70_000);
                    let mut bytes = vec![0; 1 + (round as usize * 1117) % 70_000];
                    file.read_exact_at(&mut bytes, offset).unwrap();
                    assert!(bytes == expected(ino, offset, bytes.len()));
                }
            });
        }
    });
    served.end();
}

#[test]
fn privileged_directory_and_attributes() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let served = serve(OpenMode::Cached, 2);
    let root = served.scratch.join("mnt");
    let mut names: Vec<String> = std::fs::read_dir(&root)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let wanted: Vec<&str> = served.source.blobs.iter().map(|(n, _, _)| *n).collect();
    assert_eq!(names, wanted);

    let stat = std::fs::metadata(served.path("quick")).unwrap();
    assert_eq!((stat.ino(), stat.len(), stat.nlink()), (QUICK, SIZE, 1));
    assert_eq!(stat.permissions().mode(), 0o100_444);
    assert_eq!(stat.blocks(), (SIZE / 2).div_ceil(512));
    let stat = std::fs::metadata(&root).unwrap();
    assert_eq!((stat.ino(), stat.permissions().mode()), (1, 0o040_555));

    let statfs = rustix::fs::statvfs(&root).unwrap();
    assert_eq!(
        (statfs.f_bfree, statfs.f_bavail, statfs.f_namemax),
        (0, 0, 255)
    );
    assert!(statfs.f_blocks * statfs.f_frsize >= 1 << 43);

    let missing = std::fs::File::open(served.path("missing")).unwrap_err();
    assert_eq!(errno(&missing), Some(Errno::NOENT));
    let below = std::fs::File::open(served.path("quick/below")).unwrap_err();
    assert_eq!(errno(&below), Some(Errno::NOTDIR));
    for error in [
        std::fs::OpenOptions::new()
            .write(true)
            .open(served.path("quick"))
            .unwrap_err(),
        std::fs::write(served.path("new"), b"x").unwrap_err(),
        std::fs::remove_file(served.path("quick")).unwrap_err(),
        std::fs::create_dir(served.path("new")).unwrap_err(),
        std::fs::rename(served.path("quick"), served.path("new")).unwrap_err(),
    ] {
        assert_eq!(errno(&error), Some(Errno::ROFS));
    }
    served.end();
}

/// cp, df and copy-up ask these and take a wrong errno for a failure.
#[test]
fn privileged_questions_that_have_no_answer() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let served = serve(OpenMode::Cached, 2);
    let file = std::fs::File::open(served.path("quick")).unwrap();
    // FS_IOC_GETFLAGS, TCGETS.
    assert_eq!(rustix::fs::ioctl_getflags(&file).unwrap_err(), Errno::NOTTY);
    assert_eq!(rustix::fs::ioctl_getflags(&file).unwrap_err(), Errno::NOTTY);
    assert!(!rustix::termios::isatty(&file));
    let mut value = [0_u8; 100];
    let error = rustix::fs::fgetxattr(&file, "user.none", &mut value).unwrap_err();
    assert_eq!(error, Errno::NODATA);
    let error = rustix::fs::fgetxattr(&file, "security.capability", &mut value).unwrap_err();
    assert_eq!(error, Errno::NODATA);
    assert_eq!(rustix::fs::flistxattr(&file, &mut value).unwrap(), 0);
    assert_eq!(rustix::fs::flistxattr(&file, &mut [0_u8; 0]).unwrap(), 0);
    // No holes: the whole blob is data.
    use rustix::fs::SeekFrom;
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(5000)).unwrap(), 5000);
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(5000)).unwrap(), SIZE);
    assert_eq!(
        rustix::fs::seek(&file, SeekFrom::Data(SIZE)).unwrap_err(),
        Errno::NXIO
    );
    rustix::fs::fsync(&file).unwrap();
    drop(file);
    let copy = served.scratch.join("copy");
    std::fs::copy(served.path("quick"), &copy).unwrap();
    assert!(std::fs::read(&copy).unwrap() == expected(QUICK, 0, SIZE as usize));
    served.end();
}

#[test]
fn privileged_errors_and_panics_reach_the_reader_and_nobody_else() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let served = serve(OpenMode::Direct, 2);
    for _ in 0..20 {
        for (name, wanted) in [
            ("broken", Errno::TIMEDOUT),
            ("panics", Errno::IO),
            ("panics-at-once", Errno::IO),
        ] {
            let mut file = std::fs::File::open(served.path(name)).unwrap();
            let error = file.read(&mut [0; 100]).unwrap_err();
            assert_eq!(errno(&error), Some(wanted), "{name}");
        }
        let mut file = std::fs::File::open(served.path("quick")).unwrap();
        let mut bytes = [0; 100];
        file.read_exact(&mut bytes).unwrap();
        assert!(bytes[..] == expected(QUICK, 0, 100));
    }
    served.end();
}

/// Reads that wait, more of them than channels and pool threads together, do not hold up others
/// for good, and all of them complete.
#[test]
fn privileged_waiting_reads_do_not_block_cached_ones() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let served = serve(OpenMode::Direct, 2);
    let gate = GateGuard(served.source.clone());
    std::thread::scope(|scope| {
        // Dropped at the end of the closure, before the threads are joined.
        let _gate = gate;
        for thread in 0..40_u64 {
            let path = served.path("gated");
            scope.spawn(move || {
                let file = std::fs::File::open(path).unwrap();
                let mut bytes = vec![0; 10_000];
                file.read_exact_at(&mut bytes, thread * 10_000).unwrap();
                assert!(bytes == expected(GATED, thread * 10_000, 10_000));
            });
        }
        for round in 0..50 {
            let file = std::fs::File::open(served.path("quick")).unwrap();
            let mut bytes = vec![0; 5000];
            file.read_exact_at(&mut bytes, round * 5000).unwrap();
            assert!(bytes == expected(QUICK, round * 5000, 5000));
        }
    });
    served.end();
}

/// Not a test of its own: the process that [`privileged_another_process_takes_over`] kills.
/// Serves the connection that is its standard input, and says so on standard output when a read
/// waits.
#[test]
#[ignore = "a child process of another test"]
fn child_that_serves_and_never_answers() {
    let device = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let source = Patterns::new(OpenMode::Direct);
    let session = Session::start(vec![device], SessionConfig::RECOMMENDED, source.clone()).unwrap();
    while source.waiting.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let negotiated = serde_json::to_string(&session.negotiated().unwrap()).unwrap();
    println!("\nNEGOTIATED {negotiated}");
    std::thread::sleep(LONG);
}

/// What a daemon restart needs: the descriptors outlive the process that answered INIT, another
/// one takes over, and a request that the first had read and never answered is answered.
#[test]
fn privileged_another_process_takes_over() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        skip!("needs root and /dev/fuse");
    }
    let scratch = ScratchDir::new("takeover").unwrap();
    let target = scratch.join("mnt");
    let (fd, mut all) = mount_at(&target, 1);
    let kept = all.pop().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "child_that_serves_and_never_answers",
        ])
        .stdin(kept.try_clone().unwrap())
        .stdout(Stdio::piped());
    let mut child = ChildGuard::spawn(&mut child).unwrap();
    mount::attach(fd.as_fd(), &target).unwrap();
    drop(fd);
    let guard = MountGuard::new(&target);
    // In a process of its own: a thread of this one that waits for this one could not be killed.
    let mut reader = Command::new("dd");
    reader
        .args(["bs=10000", "count=1", "status=none"])
        .arg(format!("if={}", target.join("gated").display()))
        .stdout(Stdio::piped());
    let mut reader = ChildGuard::spawn(&mut reader).unwrap();
    let lines = std::io::BufReader::new(child.child().stdout.take().unwrap()).lines();
    let line = lines
        .map(|line| line.unwrap())
        .find(|line| line.starts_with("NEGOTIATED "))
        .expect("the child ended early");
    let negotiated: Negotiated =
        serde_json::from_str(line.trim_start_matches("NEGOTIATED ")).unwrap();
    child.child().kill().unwrap();
    child.child().wait().unwrap();
    if !negotiated.can_resend() {
        skip!("this kernel has no FUSE_NOTIFY_RESEND");
    }
    let second = Patterns::new(OpenMode::Direct);
    second.open_gate();
    let resumed = Session::resume(
        vec![kept],
        negotiated,
        SessionConfig::RECOMMENDED,
        second.clone(),
    )
    .unwrap();
    let mut bytes = Vec::new();
    let mut output = reader.child().stdout.take().unwrap();
    output.read_to_end(&mut bytes).unwrap();
    assert!(bytes == expected(GATED, 0, 10_000));
    assert!(reader.child().wait().unwrap().success());
    let mut bytes = vec![0; 10];
    std::fs::File::open(target.join("quick"))
        .unwrap()
        .read_exact(&mut bytes)
        .unwrap();
    assert!(bytes == expected(QUICK, 0, 10));
    guard.unmount().unwrap();
    assert!(resumed.wait(LONG));
}
