//! Control groups of sandboxes, v2 and v1 as found.
//!
//! A sandbox gets a group `PARENT/ID` only where it needs one: in the v2
//! hierarchy for freezing and killing (also in hybrid set-ups, where that has
//! no controllers), and in the hierarchies of the controllers it is limited
//! by. Where hierarchies are is found by looking at the usual places; the
//! mount table, which is long on a busy node, is read only if they are empty.
//!
//! Processes join v1 groups by writing `0` into `tasks` themselves: the kernel
//! then skips its global lock, which costs milliseconds otherwise.

use std::io::{ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use layerpack_sys::mountinfo;
use rustix::fs::{Mode, OFlags};

use crate::error::{Result, RuntimeError};
use crate::spec::{Limits, SandboxId};

const CGROUP2_MAGIC: i64 = 0x6367_7270;
const CGROUP1_MAGIC: i64 = 0x0027_e0eb;

/// How long a group is allowed to hold dying processes when it is removed.
const REMOVE_WAIT: Duration = Duration::from_secs(5);

/// Largest control file that is read, in bytes.
const FILE_LIMIT: u64 = 64 * 1024;

/// A period of the processor limit, in microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// Devices that sandboxes may open: type, numbers, access. Making nodes is
/// left to other rules (a user namespace cannot).
const DEVICES: [&str; 10] = [
    "c *:* m",
    "b *:* m",
    "c 1:3 rwm",
    "c 1:5 rwm",
    "c 1:7 rwm",
    "c 1:8 rwm",
    "c 1:9 rwm",
    "c 5:0 rwm",
    "c 5:2 rwm",
    "c 136:* rwm",
];

/// A resource controller that can have a hierarchy of its own (v1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Cpu,
    Pids,
    Freezer,
    Devices,
}

impl Controller {
    /// Names of its v1 hierarchy, the usual ones.
    fn directories(self) -> &'static [&'static str] {
        match self {
            Self::Memory => &["memory"],
            Self::Cpu => &["cpu", "cpu,cpuacct"],
            Self::Pids => &["pids"],
            Self::Freezer => &["freezer"],
            Self::Devices => &["devices"],
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Freezer => "freezer",
            Self::Devices => "devices",
        }
    }
}

/// The hierarchies of this machine.
#[derive(Debug)]
pub(crate) struct Hierarchies {
    parent: String,
    v2: Option<PathBuf>,
    v1: Vec<(Controller, PathBuf)>,
}

/// The groups of one sandbox.
#[derive(Debug)]
pub(crate) struct Group {
    v2: Option<PathBuf>,
    v1: Vec<(Controller, PathBuf)>,
    /// v1 group that all sandboxes share, with the device policy.
    devices: Option<PathBuf>,
    /// The v2 hierarchy has controllers.
    unified: bool,
}

fn error(path: &Path, problem: impl ToString) -> RuntimeError {
    RuntimeError::Cgroup {
        path: path.to_path_buf(),
        problem: problem.to_string(),
    }
}

fn magic(path: &Path) -> Option<i64> {
    rustix::fs::statfs(path).ok().map(|s| s.f_type)
}

/// Writes a control file in one call, as the kernel wants it.
fn write(path: &Path, value: &str) -> Result<()> {
    use std::io::Write as _;
    fs_err::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|e| error(path, format!("writing {value:?}: {}", root_cause(&e))))
}

fn root_cause(e: &std::io::Error) -> String {
    use std::error::Error as _;
    e.source()
        .map_or_else(|| e.to_string(), ToString::to_string)
}

fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    fs_err::File::open(path)
        .and_then(|file| file.take(FILE_LIMIT).read_to_string(&mut text))
        .map_err(|e| error(path, root_cause(&e)))?;
    Ok(text)
}

fn make_dir(path: &Path) -> Result<()> {
    match fs_err::create_dir(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(error(path, root_cause(&e))),
    }
}

impl Hierarchies {
    /// Looks which hierarchies there are.
    ///
    /// # Errors
    /// If there are none: without, a sandbox cannot be limited.
    pub(crate) fn detect(parent: &str) -> Result<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let mut found = Self {
            parent: parent.to_owned(),
            v2: None,
            v1: Vec::new(),
        };
        if magic(root) == Some(CGROUP2_MAGIC) {
            found.v2 = Some(root.to_path_buf());
            return Ok(found);
        }
        let unified = root.join("unified");
        if magic(&unified) == Some(CGROUP2_MAGIC) {
            found.v2 = Some(unified);
        }
        for controller in [
            Controller::Memory,
            Controller::Cpu,
            Controller::Pids,
            Controller::Freezer,
            Controller::Devices,
        ] {
            let usual = controller.directories().iter().map(|name| root.join(name));
            if let Some(path) = usual.into_iter().find(|p| magic(p) == Some(CGROUP1_MAGIC)) {
                found.v1.push((controller, path));
            }
        }
        if found.v2.is_none() && found.v1.is_empty() {
            found.search()?;
        }
        // Without a freezer sandboxes are halted by signals.
        if found.v2.is_none() && found.v1.is_empty() {
            return Err(error(
                root,
                "no control group hierarchy is mounted: mount cgroup2 there",
            ));
        }
        Ok(found)
    }

    /// Finds hierarchies mounted in unusual places.
    fn search(&mut self) -> Result<()> {
        for mount in mountinfo::read()? {
            match mount.fstype.as_str() {
                "cgroup2" if self.v2.is_none() => self.v2 = Some(mount.target),
                "cgroup" => {
                    let options = mount.super_options.to_string_lossy().into_owned();
                    for controller in [
                        Controller::Memory,
                        Controller::Cpu,
                        Controller::Pids,
                        Controller::Freezer,
                        Controller::Devices,
                    ] {
                        if options.split(',').any(|o| o == controller.name())
                            && self.v1(controller).is_none()
                        {
                            self.v1.push((controller, mount.target.clone()));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn v1(&self, controller: Controller) -> Option<&Path> {
        self.v1
            .iter()
            .find(|(c, _)| *c == controller)
            .map(|(_, p)| p.as_path())
    }

    /// The v2 hierarchy carries the controllers.
    fn unified(&self) -> bool {
        self.v1.is_empty()
    }

    /// Names the groups of sandbox `id` without making them.
    pub(crate) fn group(&self, id: &SandboxId, limits: &Limits) -> Group {
        let below = |root: &Path| root.join(&self.parent).join(id.as_str());
        let mut group = Group {
            v2: self.v2.as_deref().map(below),
            v1: Vec::new(),
            devices: self
                .v1(Controller::Devices)
                .map(|root| root.join(&self.parent)),
            unified: self.unified(),
        };
        let wanted = [
            (Controller::Memory, limits.memory_bytes.is_some()),
            (Controller::Cpu, limits.cpus.is_some()),
            (Controller::Pids, limits.pids.is_some()),
            (Controller::Freezer, group.v2.is_none()),
        ];
        for (controller, wanted) in wanted {
            if wanted && let Some(root) = self.v1(controller) {
                group.v1.push((controller, below(root)));
            }
        }
        group
    }

    /// Names every group that sandbox `id` can have, whatever its limits are.
    pub(crate) fn all_groups(&self, id: &SandboxId) -> Group {
        let every = Limits {
            memory_bytes: Some(0),
            cpus: Some(0.0),
            pids: Some(0),
        };
        self.group(id, &every)
    }

    /// Makes the groups of sandbox `id` and sets its limits.
    ///
    /// # Errors
    /// If a group or limit cannot be made; what was made is removed again.
    pub(crate) fn create(&self, id: &SandboxId, limits: &Limits) -> Result<Group> {
        let group = self.group(id, limits);
        match self.fill(&group, limits) {
            Ok(()) => Ok(group),
            Err(e) => {
                let _ = group.remove();
                Err(e)
            }
        }
    }

    fn fill(&self, group: &Group, limits: &Limits) -> Result<()> {
        if let Some(devices) = &group.devices {
            device_policy(devices)?;
        }
        for dir in group.directories() {
            self.make_group(dir)?;
        }
        if group.unified {
            self.enable_controllers(limits)?;
        }
        let missing = |controller: Controller| {
            let path = Path::new("/sys/fs/cgroup");
            error(
                path,
                format!("no {} controller: leave that limit out", controller.name()),
            )
        };
        if let Some(bytes) = limits.memory_bytes {
            let dir = group
                .limit_dir(Controller::Memory)
                .ok_or_else(|| missing(Controller::Memory))?;
            set_memory(dir, group.unified, bytes)?;
        }
        if let Some(cpus) = limits.cpus {
            let dir = group
                .limit_dir(Controller::Cpu)
                .ok_or_else(|| missing(Controller::Cpu))?;
            set_cpus(dir, group.unified, cpus)?;
        }
        if let Some(pids) = limits.pids {
            let dir = group
                .limit_dir(Controller::Pids)
                .ok_or_else(|| missing(Controller::Pids))?;
            write(&dir.join("pids.max"), &pids.to_string())?;
        }
        Ok(())
    }

    /// Makes a group, and the parent of all if this is the first.
    fn make_group(&self, dir: &Path) -> Result<()> {
        match fs_err::create_dir(dir) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                if let Some(parent) = dir.parent() {
                    make_dir(parent)?;
                }
                make_dir(dir)
            }
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(error(dir, root_cause(&e))),
        }
    }

    /// Lets the groups below the parent have the controllers that limits need.
    fn enable_controllers(&self, limits: &Limits) -> Result<()> {
        let Some(root) = &self.v2 else { return Ok(()) };
        let wanted: Vec<&str> = [
            ("memory", limits.memory_bytes.is_some()),
            ("cpu", limits.cpus.is_some()),
            ("pids", limits.pids.is_some()),
        ]
        .into_iter()
        .filter(|(_, wanted)| *wanted)
        .map(|(name, _)| name)
        .collect();
        for dir in [root.clone(), root.join(&self.parent)] {
            let file = dir.join("cgroup.subtree_control");
            let on = read(&file)?;
            for name in &wanted {
                if !on.split_whitespace().any(|c| c == *name) {
                    write(&file, &format!("+{name}"))?;
                }
            }
        }
        Ok(())
    }
}

/// Sets the device policy of the group that all sandboxes share.
fn device_policy(dir: &Path) -> Result<()> {
    make_dir(dir)?;
    if read(&dir.join("devices.list"))?.starts_with("a ") {
        write(&dir.join("devices.deny"), "a")?;
        for rule in DEVICES {
            write(&dir.join("devices.allow"), rule)?;
        }
    }
    Ok(())
}

fn set_memory(dir: &Path, unified: bool, bytes: u64) -> Result<()> {
    let bytes = bytes.to_string();
    if unified {
        write(&dir.join("memory.max"), &bytes)?;
        // Absent without swap accounting.
        let swap = dir.join("memory.swap.max");
        return if swap.exists() {
            write(&swap, "0")
        } else {
            Ok(())
        };
    }
    write(&dir.join("memory.limit_in_bytes"), &bytes)?;
    let swap = dir.join("memory.memsw.limit_in_bytes");
    if swap.exists() {
        write(&swap, &bytes)
    } else {
        Ok(())
    }
}

fn set_cpus(dir: &Path, unified: bool, cpus: f64) -> Result<()> {
    // The spec was checked to be in (0, 4096).
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "small positive number, and `as` saturates"
    )]
    let quota = (cpus * CPU_PERIOD_US as f64).round().max(1_000.0) as u64;
    if unified {
        return write(&dir.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}"));
    }
    write(&dir.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
    write(&dir.join("cpu.cfs_quota_us"), &quota.to_string())
}

impl Group {
    /// The directories that belong to this sandbox alone.
    pub(crate) fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.v2.iter().chain(self.v1.iter().map(|(_, path)| path))
    }

    fn limit_dir(&self, controller: Controller) -> Option<&Path> {
        if self.unified {
            return self.v2.as_deref();
        }
        self.v1
            .iter()
            .find(|(c, _)| *c == controller)
            .map(|(_, p)| p.as_path())
    }

    /// The v1 controllers that the sandbox has a group of its own for.
    pub(crate) fn v1_controllers(&self) -> impl Iterator<Item = Controller> {
        self.v1.iter().map(|(controller, _)| *controller)
    }

    /// The v2 hierarchy is the one with the controllers.
    pub(crate) fn is_unified(&self) -> bool {
        self.unified
    }

    /// Files through which a process joins the v1 groups.
    ///
    /// # Errors
    /// If the groups are gone.
    pub(crate) fn tasks(&self) -> Result<Vec<OwnedFd>> {
        let own = self.v1.iter().map(|(_, dir)| dir);
        own.chain(&self.devices)
            .map(|dir| {
                let path = dir.join("tasks");
                rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|e| error(&path, std::io::Error::from(e)))
            })
            .collect()
    }

    /// The v2 group, for being born in it.
    ///
    /// # Errors
    /// If the group is gone.
    pub(crate) fn v2_dir(&self) -> Result<Option<OwnedFd>> {
        let Some(dir) = &self.v2 else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(dir, flags, Mode::empty())
            .map(Some)
            .map_err(|e| error(dir, std::io::Error::from(e)))
    }

    /// Halts all processes; `false` if some were not halted in time.
    ///
    /// # Errors
    /// If the group is gone.
    pub(crate) fn freeze(&self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        let freezer = self.freezer()?;
        match &freezer {
            Freezer::V2(dir) => write(&dir.join("cgroup.freeze"), "1")?,
            Freezer::V1(dir) => write(&dir.join("freezer.state"), "FROZEN")?,
        }
        let mut pause = Duration::from_micros(50);
        loop {
            if freezer.frozen()? {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
            if let Freezer::V1(dir) = &freezer {
                // v1 forgets processes that were forked meanwhile.
                write(&dir.join("freezer.state"), "FROZEN")?;
            }
        }
    }

    /// Whether there is a freezer.
    pub(crate) fn can_freeze(&self) -> bool {
        self.freezer().is_ok()
    }

    /// Lets all processes go on.
    ///
    /// # Errors
    /// If the group is gone.
    pub(crate) fn thaw(&self) -> Result<()> {
        match self.freezer()? {
            Freezer::V2(dir) => write(&dir.join("cgroup.freeze"), "0"),
            Freezer::V1(dir) => write(&dir.join("freezer.state"), "THAWED"),
        }
    }

    /// Whether the processes are halted or about to be.
    ///
    /// # Errors
    /// If the group is gone.
    pub(crate) fn is_frozen(&self) -> Result<bool> {
        match self.freezer()? {
            Freezer::V2(dir) => Ok(read(&dir.join("cgroup.freeze"))?.trim() == "1"),
            Freezer::V1(dir) => Ok(read(&dir.join("freezer.state"))?.trim() != "THAWED"),
        }
    }

    fn freezer(&self) -> Result<Freezer<'_>> {
        if let Some(dir) = &self.v2 {
            return Ok(Freezer::V2(dir));
        }
        self.v1
            .iter()
            .find(|(c, _)| *c == Controller::Freezer)
            .map(|(_, dir)| Freezer::V1(dir.as_path()))
            .ok_or_else(|| error(Path::new("/sys/fs/cgroup"), "no freezer"))
    }

    /// How often the kernel killed something in it for want of memory.
    pub(crate) fn oom_kills(&self) -> u64 {
        let Some(dir) = self.limit_dir(Controller::Memory) else {
            return 0;
        };
        let file = if self.unified {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let text = read(&dir.join(file)).unwrap_or_default();
        text.lines()
            .filter_map(|line| line.strip_prefix("oom_kill "))
            .find_map(|count| count.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Kills every process in it; nothing happens if it is gone. Halted v1
    /// groups are let go, as their processes could not die.
    pub(crate) fn kill(&self) {
        // All processes are in each group that there is.
        let Some(dir) = self.directories().find(|dir| dir.exists()) else {
            return;
        };
        // Absent in v1 and before 5.14.
        if write(&dir.join("cgroup.kill"), "1").is_err() {
            for pid in self.processes(dir) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if self.v2.is_none() {
            let _ = self.thaw();
        }
    }

    /// Its processes, by their host ids; `None` without a group.
    pub(crate) fn members(&self) -> Option<Vec<i32>> {
        let dir = self.directories().find(|dir| dir.exists())?;
        let pids = self.processes(dir);
        Some(pids.iter().map(|pid| pid.as_raw_nonzero().get()).collect())
    }

    fn processes(&self, dir: &Path) -> Vec<rustix::process::Pid> {
        let text = read(&dir.join("cgroup.procs")).unwrap_or_default();
        text.lines()
            .filter_map(|pid| pid.parse().ok().and_then(rustix::process::Pid::from_raw))
            .collect()
    }

    /// Whether any process is in it.
    pub(crate) fn is_populated(&self) -> bool {
        self.directories()
            .any(|dir| !self.processes(dir).is_empty())
    }

    /// Removes the groups, waiting for dying processes to be gone.
    ///
    /// # Errors
    /// `EBUSY` if processes stay.
    pub(crate) fn remove(&self) -> Result<()> {
        let deadline = Instant::now() + REMOVE_WAIT;
        for dir in self.directories() {
            let mut pause = Duration::from_micros(100);
            loop {
                match rustix::fs::rmdir(dir) {
                    Ok(()) | Err(rustix::io::Errno::NOENT) => break,
                    Err(rustix::io::Errno::BUSY) if Instant::now() < deadline => {
                        std::thread::sleep(pause);
                        pause = (pause * 2).min(Duration::from_millis(20));
                    }
                    Err(e) => return Err(error(dir, format!("removing it: {e}"))),
                }
            }
        }
        Ok(())
    }
}

/// What halts the processes of a group.
enum Freezer<'a> {
    V2(&'a Path),
    V1(&'a Path),
}

impl Freezer<'_> {
    fn frozen(&self) -> Result<bool> {
        match self {
            Self::V2(dir) => Ok(read(&dir.join("cgroup.events"))?
                .lines()
                .any(|line| line == "frozen 1")),
            Self::V1(dir) => Ok(read(&dir.join("freezer.state"))?.trim() == "FROZEN"),
        }
    }
}
