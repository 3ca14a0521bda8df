//! A program that uses the crate, for its tests: PID 1 under that name, else a
//! launcher of its own that tests can kill.
//!
//! `run|keep|create|exec|freeze ROOT CGROUP LOWER TARGET SCRIPT`; TARGET is an
//! id, for a new sandbox also `ID=NAME`.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use layerpack_runtime::{
    ExecSpec, INIT_ARG0, IdMap, Limits, Network, RuntimeError, SandboxSpec, Sandboxes,
    SandboxesOptions, Streams,
};

fn main() -> ExitCode {
    let mut args = std::env::args();
    if args.next().as_deref() == Some(INIT_ARG0) {
        layerpack_runtime::init_main();
    }
    match launcher(args.collect()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn launcher(args: Vec<String>) -> Result<u8, RuntimeError> {
    let [what, root, parent, lower, target, script] = <[String; 6]>::try_from(args)
        .map_err(|_| RuntimeError::NotFound("arguments".to_owned()))?;
    let sandboxes = Sandboxes::open(SandboxesOptions {
        root: PathBuf::from(root),
        init: None,
        agent: None,
        cgroup_parent: parent,
        stop_by_signals: false,
    })?;
    let command = ExecSpec {
        argv: ["sh", "-c", &script].map(Into::into).to_vec(),
        forward_signals: true,
        ..ExecSpec::default()
    };
    let spec = || -> Result<SandboxSpec, RuntimeError> {
        let (id, name) = match target.split_once('=') {
            Some((id, name)) => (id, Some(name.parse()?)),
            None => (target.as_str(), None),
        };
        Ok(SandboxSpec {
            id: id.parse()?,
            name,
            stack: Vec::new(),
            lowers: vec![PathBuf::from(&lower)],
            hostname: None,
            limits: Limits::default(),
            network: Network::None,
            id_map: IdMap {
                base: 1 << 20,
                count: 1 << 16,
            },
            read_only: false,
            no_new_privileges: false,
            env: Vec::new(),
            channel: false,
            lease: None,
            labels: BTreeMap::new(),
        })
    };
    match what.as_str() {
        "run" | "keep" => Ok(sandboxes
            .run(&spec()?, &command, Streams::inherit(true)?, what == "keep")?
            .code),
        "create" => sandboxes.create(&spec()?).map(|_| 0),
        "exec" => Ok(sandboxes
            .exec(&target, &command, Streams::inherit(true)?)?
            .code),
        _ => {
            let _guard = sandboxes.freeze(&target, Duration::from_secs(10))?;
            println!("frozen");
            std::thread::sleep(Duration::from_secs(1000));
            Ok(0)
        }
    }
}
