//! Rules that keep things out of snapshots.

use std::path::Path;
use std::time::SystemTime;

use layerpack_fixtures::ScratchDir;
use layerpack_packer::{
    LowerLayer, MergeOptions, OverlayXattrs, PackDiffOptions, PackDiffReport, PackError, Rules,
    Silent, merge_with_rules, pack_diff,
};
use layerpack_store::LayerStore;
use rustix::fs::{XattrFlags, setxattr};

use crate::support::{Packed, Tree, memory_store};

fn options(upper: &Path, rules: &str) -> PackDiffOptions {
    let mut options = PackDiffOptions::new("diff/d:1".parse().unwrap(), upper.to_owned());
    // Marks that anybody may set.
    options.overlay_xattrs = OverlayXattrs::User;
    options.rules = Some(Rules::parse(rules, SystemTime::now()).unwrap());
    options
}

#[track_caller]
fn packed(store: &LayerStore, options: &PackDiffOptions) -> (Tree, PackDiffReport) {
    let report = pack_diff(store, options, &Silent).unwrap();
    let digest = report.published.as_ref().unwrap().digest;
    (Packed::load(store, digest, Vec::new()).tree(), report)
}

fn write(dir: &Path, path: &str, bytes: impl AsRef<[u8]>) {
    let path = dir.join(path);
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::write(path, bytes).unwrap();
}

fn whiteout(dir: &Path, path: &str) {
    write(dir, path, "");
    setxattr(
        dir.join(path),
        "user.overlay.whiteout",
        b"y",
        XattrFlags::empty(),
    )
    .unwrap();
    let parent = dir.join(path);
    let parent = parent.parent().unwrap();
    setxattr(parent, "user.overlay.opaque", b"x", XattrFlags::empty()).unwrap();
}

const KEY: &str =
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n";

#[test]
fn built_in_sets_take_what_they_name_and_leave_the_rest() {
    let scratch = ScratchDir::new("sets").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let gone = [
        "var/cache/apt/archives/a.deb",
        "var/lib/apt/lists/x/y",
        "root/.cache/pip/http/a",
        "home/me/.npm/_cacache/x",
        "root/.bash_history",
        "home/me/.python_history",
        "tmp/job/half",
        "tmp/file",
        "run/pid",
        "root/.ssh/id_ed25519",
        "root/.ssh/config",
        "home/me/.aws/credentials",
        "home/me/.docker/config.json",
        "home/me/.netrc",
        "srv/store.p12",
        "var/log/agent.log",
        "root/.claude/projects/p/session.jsonl",
    ];
    let kept = [
        "workspace/src/main.rs",
        "workspace/history.txt",
        "home/me/.docker/other.json",
        "etc/ssh/sshd_config",
        "usr/lib/python3/site-packages/x.py",
        "root/.claude/settings.json",
    ];
    for path in gone.iter().chain(&kept) {
        write(&upper, path, "0123456789");
    }
    let store = memory_store();
    let (tree, report) = packed(&store, &options(&upper, Rules::standard()));
    for path in gone {
        assert!(!tree.has(path), "{path}");
    }
    for path in kept {
        assert!(tree.has(path), "{path}");
    }
    let scrub = &report.scrub;
    assert_eq!(scrub.scrubbed.total.entries, gone.len() as u64);
    assert_eq!(scrub.scrubbed.total.bytes, 10 * gone.len() as u64);
    assert_eq!(
        (scrub.kept.entries, scrub.kept.bytes),
        (kept.len() as u64, 10 * kept.len() as u64)
    );
    assert!(scrub.forbidden.is_empty() && scrub.suspicious.is_empty());
    let named = |path: &str| {
        let found = scrub.scrubbed.named.iter().find(|f| f.path == path);
        found.map(|f| (f.rule.as_str(), f.entries, f.bytes))
    };
    assert_eq!(named("/root/.ssh/"), Some(("ssh", 2, 20)));
    assert_eq!(named("/tmp/job/"), Some(("temp-files", 1, 10)));
    assert_eq!(named("/root/.bash_history"), Some(("shell-history", 1, 10)));
    // What rules emptied goes; what was there otherwise stays.
    assert!(!tree.has("root/.ssh") && !tree.has("tmp/work") && tree.has("tmp"));
    // Nothing of what was left out is in the store.
    let rules = report.scrub.rules.clone().unwrap();
    let digest = report.published.unwrap().digest;
    let manifest = store.manifest(&digest).unwrap();
    assert_eq!(manifest.parameters["scrub-rules"], rules);
}

#[test]
fn what_a_sandbox_took_away_stays_away() {
    let scratch = ScratchDir::new("taken").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    whiteout(&upper, "root/.ssh/id_rsa");
    write(&upper, "root/.ssh/other", "x");
    write(&upper, "var/log/opaque/new", "x");
    setxattr(
        upper.join("var/log/opaque"),
        "user.overlay.opaque",
        b"y",
        XattrFlags::empty(),
    )
    .unwrap();
    let (tree, _) = packed(&memory_store(), &options(&upper, Rules::standard()));
    assert!(tree.is_whiteout("root/.ssh/id_rsa") && !tree.has("root/.ssh/other"));
    assert!(tree.is_opaque("var/log/opaque") && !tree.has("var/log/opaque/new"));
}

#[test]
fn contents_are_looked_at_before_they_are_stored() {
    let scratch = ScratchDir::new("contents").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let secret = format!("{KEY}{}", "z".repeat(600_000));
    write(&upper, "srv/notes", KEY);
    write(&upper, "srv/large", &secret);
    write(&upper, "srv/allowed", KEY);
    write(&upper, "srv/plain", "nothing of interest");
    fs_err::hard_link(upper.join("srv/notes"), upper.join("second-name")).unwrap();
    let rules = "
        [[rule]]
        action = \"keep\"
        globs = [\"allowed\"]
        [[rule]]
        name = \"no-keys\"
        content = [\"private-key\"]
    ";
    let store = memory_store();
    let (tree, report) = packed(&store, &options(&upper, rules));
    assert_eq!(
        tree.paths(),
        ["", "srv", "srv/allowed", "srv/plain"],
        "all names of a file go"
    );
    let found = &report.scrub.scrubbed.named;
    assert!(
        found
            .iter()
            .all(|f| f.rule == "no-keys" && f.pattern.as_deref() == Some("private-key")),
        "{found:?}"
    );
    // Not even without a name: what was written is the two small files.
    let stats = report.published.unwrap().stats;
    assert_eq!(stats.raw_bytes, (KEY.len() + 19) as u64);

    // Suspicious: packed and named. Too large: said.
    let rules = "sets = [\"secrets\"]\nmax-content = \"1k\"\n";
    let (tree, report) = packed(&memory_store(), &options(&upper, rules));
    assert!(tree.has("srv/notes") && tree.has("srv/large"));
    assert_eq!(report.scrub.suspicious.named.len(), 2);
    assert_eq!(report.scrub.too_large.total.bytes, secret.len() as u64);
}

#[test]
fn what_is_forbidden_makes_the_pack_fail() {
    let scratch = ScratchDir::new("forbid").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    write(&upper, "job/answers/one", "42");
    write(&upper, "job/text", "the INTERNAL ONLY plan");
    write(&upper, "job/fine", "x");
    for (rule, path) in [
        ("globs = [\"/job/answers/\"]", "/job/answers/"),
        ("text = [\"INTERNAL ONLY\"]", "/job/text"),
        (
            "larger-than = \"5\"\nowners = [\"0-4294967294\"]",
            "/job/text",
        ),
    ] {
        let rules = format!("[[rule]]\nname = \"mine\"\naction = \"forbid\"\n{rule}\n");
        let store = memory_store();
        let mut options = options(&upper, &rules);
        let error = pack_diff(&store, &options, &Silent).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, PackError::Forbidden { .. })
                && text.contains(path)
                && text.contains("mine"),
            "{text}"
        );
        assert!(store.entries().unwrap().is_empty(), "{rule}");
        // A dry run says the same without failing.
        options.dry_run = true;
        let report = pack_diff(&store, &options, &Silent).unwrap();
        assert!(report.published.is_none());
        assert_eq!(report.scrub.forbidden.named[0].path, path);
    }
}

#[test]
fn a_dry_run_counts_and_writes_nothing() {
    let scratch = ScratchDir::new("dry").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    write(&upper, "root/.bash_history", "make");
    write(&upper, "kept", vec![7; 100_000]);
    let store = memory_store();
    let mut with = options(&upper, Rules::standard());
    with.dry_run = true;
    let report = pack_diff(&store, &with, &Silent).unwrap();
    assert_eq!(report.scrub.kept.bytes, 100_000);
    assert_eq!(report.scrub.scrubbed.total.entries, 1);
    assert_eq!(report.counts.files, 1);
    assert!(report.published.is_none() && store.entries().unwrap().is_empty());
}

#[test]
fn what_is_in_a_layer_below_is_said() {
    let scratch = ScratchDir::new("below").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let (high, low) = (
        scratch.mkdir("high").unwrap(),
        scratch.mkdir("low").unwrap(),
    );
    for dir in [&high, &low] {
        write(dir, "root/.ssh/id_rsa", "old");
    }
    write(&low, "root/.netrc", "old");
    write(&low, "root/.bash_history", "old");
    write(&upper, "root/.netrc", "new");
    write(&upper, "root/.zsh_history", "new");
    whiteout(&upper, "root/.ssh/id_rsa");
    whiteout(&upper, "root/.bash_history");
    // A link in a layer leads nowhere.
    std::os::unix::fs::symlink("/etc", high.join("etc")).unwrap();
    write(&upper, "etc/ssh/ssh_host_rsa_key", "new");
    let mut with = options(&upper, Rules::standard());
    with.lowers = [("toolkit/t:1", &high), ("base/b:1", &low)]
        .map(|(name, path)| LowerLayer {
            name: name.to_owned(),
            path: path.clone(),
            diff: false,
        })
        .into();
    let report = pack_diff(&memory_store(), &with, &Silent).unwrap();
    let below: Vec<(&str, Vec<&str>, bool)> = report
        .scrub
        .still_below
        .iter()
        .map(|b| {
            let layers = b.layers.iter().map(String::as_str).collect();
            (b.path.as_str(), layers, b.visible)
        })
        .collect();
    assert_eq!(
        below,
        [
            ("/root/.bash_history", vec!["base/b:1"], false),
            ("/root/.netrc", vec!["base/b:1"], true),
            ("/root/.ssh/id_rsa", vec!["toolkit/t:1", "base/b:1"], false),
        ]
    );
}

/// Runs git in a directory, on a day of the year 2020.
#[track_caller]
fn git(dir: &Path, day: u32, arguments: &[&str]) -> String {
    let date = format!("2020-01-{day:02}T12:00:00Z");
    let output = std::process::Command::new("git")
        .current_dir(dir)
        .args([
            "-c",
            "safe.directory=*",
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
        ])
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_COMMITTER_DATE", &date)
        .env("GIT_AUTHOR_DATE", &date)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn git_forgets_what_is_newer_than_a_commit() {
    if layerpack_fixtures::find_tool("git").is_none() {
        layerpack_fixtures::skip!("needs git");
    }
    for in_packs in [false, true] {
        let scratch = ScratchDir::new("history").unwrap();
        let upper = scratch.mkdir("upper").unwrap();
        let repository = scratch.mkdir("upper/job/repo").unwrap();
        git(&repository, 1, &["init", "-q", "-b", "main"]);
        let mut commits = Vec::new();
        for day in 1..=4 {
            fs_err::write(
                repository.join("f"),
                "line\n".repeat(200) + &day.to_string(),
            )
            .unwrap();
            git(&repository, day, &["add", "."]);
            git(
                &repository,
                day,
                &["commit", "-q", "-m", &format!("day {day}")],
            );
            commits.push(git(&repository, day, &["rev-parse", "HEAD"]));
            git(
                &repository,
                day,
                &["tag", "-a", "-m", "t", &format!("v{day}")],
            );
            git(&repository, day, &["branch", &format!("b{day}")]);
        }
        // An old date on top does not make what is below it old.
        git(
            &repository,
            1,
            &["commit", "-q", "--allow-empty", "-m", "x"],
        );
        git(&repository, 1, &["branch", "forged"]);
        git(&repository, 1, &["reset", "-q", "--hard", "HEAD^"]);
        git(&repository, 5, &["checkout", "-q", "b2"]);
        // Commits that say they are old: on top of the named one, beside it, and of no origin.
        let tree = git(&repository, 1, &["rev-parse", "HEAD^{tree}"]);
        for (name, on) in [("late", Some(1)), ("beside", Some(0)), ("orphan", None)] {
            let mut arguments = vec!["commit-tree", "-m", name, &tree];
            if let Some(on) = on {
                arguments.extend(["-p", commits[on].as_str()]);
            }
            let id = git(&repository, 1, &arguments);
            git(&repository, 1, &["branch", name, &id]);
            git(
                &repository,
                1,
                &["tag", "-a", "-m", "t", &format!("v-{name}"), &id],
            );
        }
        let merging = format!("{}\n{}\n", commits[0], commits[3]);
        write(&repository, ".git/MERGE_HEAD", merging);
        if in_packs {
            // Its commits are years old: they would be expired with the packing.
            let keep = ["gc.reflogExpire=never", "gc.reflogExpireUnreachable=never"];
            git(&repository, 5, &["-c", keep[0], "-c", keep[1], "gc", "-q"]);
            git(&repository, 5, &["pack-refs", "--all"]);
        }
        // Another repository has nothing to do with the commit.
        let other = scratch.mkdir("upper/job/other").unwrap();
        git(&other, 9, &["init", "-q", "-b", "main"]);
        git(&other, 9, &["commit", "-q", "--allow-empty", "-m", "later"]);

        let rules = format!(
            "[[git]]\nname = \"future\"\nnewer-than = \"{}\"\n",
            commits[1]
        );
        let store = memory_store();
        let (tree, report) = packed(&store, &options(&upper, &rules));
        let out = scratch.join("out");
        let digest = report.published.as_ref().unwrap().digest;
        layerpack_packer::checkout(&store, &[digest], &out, &Silent).unwrap();
        let shown = out.join("job/repo");
        let refs = git(&shown, 9, &["for-each-ref", "--format=%(refname:short)"]);
        assert_eq!(refs, "b1\nb2\nv1\nv2", "packed: {in_packs}");
        let log = git(&shown, 9, &["log", "-g", "--format=%H", "HEAD"]);
        for commit in &commits[2..] {
            assert!(!log.contains(commit.as_str()), "{log}");
        }
        assert!(log.contains(commits[0].as_str()), "{log}");
        assert_eq!(git(&shown, 9, &["rev-parse", "HEAD"]), commits[1]);
        assert_eq!(
            git(&out.join("job/other"), 9, &["rev-list", "--count", "main"]),
            "1"
        );
        assert!(tree.has("job/repo/.git/HEAD"));
        assert!(!tree.has("job/repo/.git/MERGE_HEAD"));
        let gone = report.scrub.scrubbed.total.entries + report.scrub.shortened.total.entries;
        assert!(gone >= 2, "{:?}", report.scrub);
        assert!(
            report
                .scrub
                .shortened
                .named
                .iter()
                .all(|f| f.rule == "future" && f.pattern.as_deref() == Some("newer-commit"))
        );
        assert!(report.scrub.idle_git.is_empty());
        // A rule that can do nothing says so.
        let unknown = rules.replace(&commits[1], &"ab".repeat(20));
        let mut options = options(&upper, &unknown);
        options.dry_run = true;
        let report = pack_diff(&store, &options, &Silent).unwrap();
        assert_eq!(report.scrub.idle_git, ["future"]);
    }
}

/// A repository with two commits, on `main` and on `next`; their ids.
fn two_commits(repository: &Path) -> [String; 2] {
    git(repository, 1, &["init", "-q", "-b", "main"]);
    let commit = ["commit", "-q", "--allow-empty", "-m", "m"];
    git(repository, 1, &commit);
    let first = git(repository, 1, &["rev-parse", "HEAD"]);
    git(repository, 2, &["checkout", "-q", "-b", "next"]);
    git(repository, 2, &commit);
    let second = git(repository, 2, &["rev-parse", "HEAD"]);
    git(repository, 3, &["checkout", "-q", "main"]);
    [first, second]
}

#[test]
fn git_of_a_diff_below_is_told() {
    if layerpack_fixtures::find_tool("git").is_none() {
        layerpack_fixtures::skip!("needs git");
    }
    let scratch = ScratchDir::new("below-git").unwrap();
    let [upper, diff, base] = ["upper", "diff", "base"].map(|name| scratch.mkdir(name).unwrap());
    let repository = scratch.mkdir("diff/job/repo").unwrap();
    let [first, second] = two_commits(&repository);
    // The base's own history is not the sandbox's.
    let own = scratch.mkdir("base/src").unwrap();
    git(&own, 1, &["clone", "-q", repository.to_str().unwrap(), "."]);
    let report = |commit: &str| {
        let rules = format!("[[git]]\nname = \"future\"\nnewer-than = \"{commit}\"\n");
        let mut with = options(&upper, &rules);
        with.lowers = [("diff/d:1", &diff, true), ("base/b:1", &base, false)]
            .map(|(name, path, diff)| LowerLayer {
                name: name.to_owned(),
                path: path.clone(),
                diff,
            })
            .into();
        pack_diff(&memory_store(), &with, &Silent).unwrap().scrub
    };
    let told = report(&first);
    let paths: Vec<&str> = told.git_below.iter().map(|b| b.path.as_str()).collect();
    assert!(
        paths.contains(&"/job/repo/.git/refs/heads/next")
            && paths.contains(&"/job/repo/.git/logs/HEAD")
            && !paths.contains(&"/job/repo/.git/refs/heads/main"),
        "{paths:?}"
    );
    assert!(
        told.git_below
            .iter()
            .all(|b| b.layers == ["diff/d:1"] && b.rule == "future")
    );
    assert!(told.idle_git.is_empty() && told.git_unseen.is_empty());
    // Nothing to tell of the newest commit; a commit that no repository has is told as ever.
    let told = report(&second);
    assert!(
        told.git_below.is_empty() && told.idle_git.is_empty(),
        "{told:?}"
    );
    let told = report(&"ab".repeat(20));
    assert!(told.git_below.is_empty());
    assert_eq!(told.idle_git, ["future"]);
    // What the sandbox removed does not show.
    whiteout(&upper, "job/repo");
    let told = report(&first);
    assert!(told.git_below.is_empty(), "{:?}", told.git_below);
}

#[test]
fn a_reference_below_is_told_if_it_names_what_is_newer() {
    if layerpack_fixtures::find_tool("git").is_none() {
        layerpack_fixtures::skip!("needs git");
    }
    let scratch = ScratchDir::new("below-refs").unwrap();
    let [upper, base] = ["upper", "base"].map(|name| scratch.mkdir(name).unwrap());
    let repository = scratch.mkdir("base/repo").unwrap();
    let [first, second] = two_commits(&repository);
    // The sandbox moves both branches; below, only `next` names the newer commit.
    for name in ["main", "next"] {
        write(
            &upper,
            &format!("repo/.git/refs/heads/{name}"),
            format!("{second}\n"),
        );
    }
    let rules = format!("[[git]]\nname = \"future\"\nnewer-than = \"{first}\"\n");
    let mut with = options(&upper, &rules);
    with.lowers = vec![LowerLayer {
        name: "base/b:1".to_owned(),
        path: base,
        diff: false,
    }];
    let scrub = pack_diff(&memory_store(), &with, &Silent).unwrap().scrub;
    assert_eq!(scrub.scrubbed.total.entries, 2);
    let below: Vec<&str> = scrub.still_below.iter().map(|b| b.path.as_str()).collect();
    assert_eq!(below, ["/repo/.git/refs/heads/next"]);
}

#[test]
fn files_of_git_that_are_not_read_do_not_stay_in_silence() {
    if layerpack_fixtures::find_tool("git").is_none() {
        layerpack_fixtures::skip!("needs git");
    }
    let scratch = ScratchDir::new("unread-git").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let repository = scratch.mkdir("upper/repo").unwrap();
    let [first, second] = two_commits(&repository);
    // Above `max-content`, with a reference to a newer commit at its end.
    let padding = "# padding\n".repeat(100);
    let packed_refs = format!("{padding}{first} refs/heads/a\n{second} refs/heads/b\n");
    write(&repository, ".git/packed-refs", packed_refs);
    write(&repository, ".git/reftable/0x1.ref", "REFT");
    let huge = fs_err::File::create(repository.join(".git/FETCH_HEAD")).unwrap();
    huge.set_len(65 << 20).unwrap();
    let rules = format!("max-content = \"100\"\n[[git]]\nnewer-than = \"{first}\"\n");
    let (tree, report) = packed(&memory_store(), &options(&upper, &rules));
    let left = tree.get("repo/.git/packed-refs").content();
    assert_eq!(
        String::from_utf8(left).unwrap(),
        format!("{padding}{first} refs/heads/a\n")
    );
    assert!(!tree.has("repo/.git/FETCH_HEAD"));
    let pattern = |path: &str, all: &layerpack_packer::Findings| {
        let found = all.named.iter().find(|f| f.path == path);
        found.and_then(|f| f.pattern.clone())
    };
    let scrub = &report.scrub;
    assert_eq!(
        pattern("/repo/.git/FETCH_HEAD", &scrub.scrubbed).as_deref(),
        Some("too-large")
    );
    assert_eq!(
        pattern("/repo/.git/reftable/0x1.ref", &scrub.suspicious).as_deref(),
        Some("reftable")
    );
    assert_eq!(scrub.too_large.total.entries, 0);
}

#[test]
fn git_of_layers_in_the_store_forgets_too() {
    if layerpack_fixtures::find_tool("git").is_none() {
        layerpack_fixtures::skip!("needs git");
    }
    for in_packs in [false, true] {
        let scratch = ScratchDir::new("stored-git").unwrap();
        let [low, high] = ["low", "high"].map(|name| scratch.mkdir(name).unwrap());
        let repository = scratch.mkdir("low/job/repo").unwrap();
        let [first, second] = two_commits(&repository);
        if in_packs {
            git(&repository, 3, &["repack", "-adq"]);
        }
        write(&high, "job/repo/.git/refs/heads/x", format!("{second}\n"));
        write(&high, "job/repo/.git/refs/heads/y", format!("{first}\n"));
        let store = memory_store();
        for (n, upper) in [(1, &low), (2, &high)] {
            let mut options = options(upper, "");
            options.rules = None;
            options.reference = format!("diff/g:{n}").parse().unwrap();
            pack_diff(&store, &options, &Silent).unwrap();
        }
        let rules = format!("[[git]]\nnewer-than = \"{first}\"\n");
        let rules = Rules::parse(&rules, SystemTime::now()).unwrap();
        let squash = |name: &str, layers: &[&str], below: &[&str]| {
            let layers = layers.iter().map(|text| text.parse().unwrap()).collect();
            let below: Vec<_> = below
                .iter()
                .map(|text| store.load(&text.parse().unwrap()).unwrap())
                .collect();
            let options = MergeOptions::new(name.parse().unwrap(), layers);
            let report = merge_with_rules(&store, &options, &below, &rules, &Silent).unwrap();
            let digest = report.merged.published.digest;
            assert!(report.scrub.idle_git.is_empty());
            Packed::load(&store, digest, Vec::new()).tree()
        };
        let refs = "job/repo/.git/refs/heads";
        let both = squash("diff/all:1", &["diff/g:1", "diff/g:2"], &[]);
        for (name, stays) in [("main", true), ("next", false), ("x", false), ("y", true)] {
            assert_eq!(both.has(&format!("{refs}/{name}")), stays, "{name}");
        }
        // The objects may be in what it lies on.
        let top = squash("diff/top:1", &["diff/g:2"], &["diff/g:1"]);
        assert!(top.has(&format!("{refs}/y")) && !top.has(&format!("{refs}/x")));
    }
}
