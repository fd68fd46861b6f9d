//! Memory and processor time of a process, from `/proc`.
//!
//! Parsing is apart from reading. A process that has ended has neither: reads give `None`.

use std::fs;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};

/// The fields of `/proc/<pid>/stat` from the state on (the third field of the file is the first here).
#[must_use]
pub fn parse_stat(stat: &str) -> Option<Vec<&str>> {
    // The name before it is in parentheses and may itself hold any of them.
    Some(stat.rsplit_once(')')?.1.split_whitespace().collect())
}

/// Processor time in user and kernel mode, in clock ticks, from the text of `/proc/<pid>/stat`.
#[must_use]
pub fn parse_cpu_ticks(stat: &str) -> Option<u64> {
    let fields = parse_stat(stat)?;
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(ticks(11)? + ticks(12)?)
}

/// A value in kB of `/proc/<pid>/status`, such as `VmRSS`, in bytes.
#[must_use]
pub fn parse_status_bytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// A value of `/proc/<pid>/status` such as `VmRSS`, in bytes.
#[must_use]
pub fn status_bytes(pid: u32, field: &str) -> Option<u64> {
    parse_status_bytes(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, field)
}

/// Resident memory in bytes.
#[must_use]
pub fn rss_bytes(pid: u32) -> Option<u64> {
    status_bytes(pid, "VmRSS")
}

/// Processor time so far, in clock ticks, see [`ticks_per_second`].
#[must_use]
pub fn cpu_ticks(pid: u32) -> Option<u64> {
    parse_cpu_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Clock ticks in a second; 100 where the system does not say.
#[must_use]
pub fn ticks_per_second() -> u64 {
    let said = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    said.and_then(|ticks| u64::try_from(ticks).ok()).filter(|ticks| *ticks > 0).unwrap_or(100)
}

/// The sum over all threads of the nanoseconds on a processor, from `/proc/<pid>/task/*/schedstat`: finer than ticks.
#[must_use]
pub fn cpu_time(pid: u32) -> Option<Duration> {
    let mut nanos = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        // A thread may end between the two reads; its time is then lost, which a process at rest does not have.
        let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else { continue };
        nanos += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "12 (a (b) c) S 1 12 12 0 -1 4194560 100 0 0 0 7 5 0 0 20 0 3 0 4242 1000 10";
        assert_eq!(parse_cpu_ticks(stat), Some(12));
        assert_eq!(parse_stat(stat).unwrap()[0], "S");
        assert_eq!(parse_cpu_ticks("12 (a) S 1"), None);
        assert_eq!(parse_cpu_ticks(""), None);
    }

    #[test]
    fn memory_is_in_bytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        assert_eq!(parse_status_bytes(status, "VmRSS"), Some(1 << 20));
        assert_eq!(parse_status_bytes(status, "VmHWM"), Some(2 << 20));
        assert_eq!(parse_status_bytes(status, "Vm"), None);
    }

    #[test]
    fn this_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(rss_bytes(pid).unwrap() > 0 && status_bytes(pid, "RssFile").is_some());
        assert!(cpu_ticks(pid).is_some() && cpu_time(pid).is_some() && ticks_per_second() > 0);
    }
}
