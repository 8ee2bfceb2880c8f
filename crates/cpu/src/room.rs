//! The host memory that this process may use, as reported by Linux: the machine's memory and the limits of the process's control groups.
//! Memory that the system would reclaim, mainly cached files, counts as free.

use nibble_core::Room;
use std::path::{Path, PathBuf};

/// Bytes of this machine's memory, if the system reports them.
pub(crate) fn machine_bytes() -> Option<usize> {
    kib(Path::new("/proc/meminfo"), "MemTotal:")
}

/// The memory available to this process, if the system reports it.
pub(crate) fn of_this_process() -> Option<Room> {
    below(Path::new("/"))
}

/// The memory available to this process, read from the system files below `root`.
fn below(root: &Path) -> Option<Room> {
    let meminfo = root.join("proc/meminfo");
    let (total_bytes, available) = (kib(&meminfo, "MemTotal:")?, kib(&meminfo, "MemAvailable:")?);
    let own = kib(&root.join("proc/self/status"), "RssAnon:").unwrap_or(0);
    let others_bytes = total_bytes.saturating_sub(available).saturating_sub(own);
    let machine = Room { total_bytes, others_bytes };
    let limits = groups(root).into_iter().filter_map(|group| group.room(own));
    // A group without a limit reports a limit beyond the machine's memory.
    let limits = limits.filter(|room| room.total_bytes < total_bytes);
    std::iter::once(machine).chain(limits).min_by_key(Room::bytes)
}

/// A control group that limits memory.
struct Group {
    dir: PathBuf,
    /// The names of the group's limit file and usage file.
    names: [&'static str; 2],
    /// Keys of reclaimable memory in `memory.stat`: cached files, and with cgroup version 2 also reclaimable kernel memory.
    droppable: &'static [&'static str],
}

type Version = ([&'static str; 2], &'static [&'static str]);
const VERSION_2: Version =
    (["memory.max", "memory.current"], &["inactive_file", "active_file", "slab_reclaimable"]);
const VERSION_1: Version =
    (["memory.limit_in_bytes", "memory.usage_in_bytes"], &["total_inactive_file", "total_active_file"]);

impl Group {
    fn room(&self, own: usize) -> Option<Room> {
        let [limit, usage] = self.names;
        let number = |name: &str| std::fs::read_to_string(self.dir.join(name)).ok()?.trim().parse().ok();
        let (total_bytes, used): (usize, usize) = (number(limit)?, number(usage)?);
        let stat = std::fs::read_to_string(self.dir.join("memory.stat")).unwrap_or_default();
        let bytes = |name: &&str| -> usize {
            let of_line = |line: &str| line.strip_prefix(*name)?.strip_prefix(' ')?.trim().parse().ok();
            stat.lines().find_map(of_line).unwrap_or(0)
        };
        let dropped = self.droppable.iter().map(bytes).fold(0, usize::saturating_add);
        let others_bytes = used.saturating_sub(dropped).saturating_sub(own);
        Some(Room { total_bytes, others_bytes })
    }
}

/// The control groups of this process, each with all of its ancestors.
fn groups(root: &Path) -> Vec<Group> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    // A line is `0::/path` in version 2, and `4:memory:/path` in version 1.
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, (names, droppable)) = match controllers {
            "" => ("sys/fs/cgroup", VERSION_2),
            list if list.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", VERSION_1),
            _ => continue,
        };
        let ancestors = Path::new(path.trim_start_matches('/')).ancestors();
        groups.extend(ancestors.map(|part| Group { dir: root.join(mount).join(part), names, droppable }));
    }
    groups
}

/// The bytes of a line `KEY  123 kB`.
fn kib(path: &Path, key: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    /// The result for a machine with 64 GiB, of which 40 GiB are available, a process that uses 4 GiB, and these additional files.
    fn machine(files: &[(&str, &str)]) -> Option<Room> {
        let root = tempfile::tempdir().unwrap();
        let common = [
            ("proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   41943040 kB\n"),
            ("proc/self/status", "Name:\tnibble\nVmRSS:\t 5242880 kB\nRssAnon:\t 4194304 kB\n"),
        ];
        for (name, text) in common.iter().chain(files) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        below(root.path())
    }

    fn room(total: usize, others: usize) -> Option<Room> {
        Some(Room { total_bytes: total * GIB, others_bytes: others * GIB })
    }

    #[test]
    fn what_others_hold_of_a_machine_is_not_to_be_had() {
        assert_eq!(machine(&[]), room(64, 20));
        assert_eq!(machine(&[]).unwrap().bytes(), 44 * GIB);
        assert_eq!(below(Path::new("/nowhere")), None);
    }

    #[test]
    fn the_tightest_control_group_counts() {
        let ten = "10737418240\n";
        // Version 2: a slice has a limit of 32 GiB, and the service in it has no limit.
        let slice = [
            ("proc/self/cgroup", "0::/user.slice/run.service\n"),
            ("sys/fs/cgroup/user.slice/run.service/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/run.service/memory.current", ten),
            ("sys/fs/cgroup/user.slice/memory.max", "34359738368\n"),
            ("sys/fs/cgroup/user.slice/memory.current", ten),
            (
                "sys/fs/cgroup/user.slice/memory.stat",
                "anon 5\ninactive_file 2147483648\nactive_file 1073741824\nslab_reclaimable 536870912\nslab 1073741824\n",
            ),
        ];
        // 10 GiB are in use: 3 GiB of cached files, 0.5 GiB of reclaimable kernel memory, 4 GiB of this process, and the memory of others.
        assert_eq!(machine(&slice), Some(Room { total_bytes: 32 * GIB, others_bytes: 5 * GIB / 2 }));
        // Version 1: a group without a limit reports a very large limit.
        let dir = "sys/fs/cgroup/memory/job";
        let (limit, usage, stat) = (
            format!("{dir}/memory.limit_in_bytes"),
            format!("{dir}/memory.usage_in_bytes"),
            format!("{dir}/memory.stat"),
        );
        let group = |limited| {
            machine(&[
                ("proc/self/cgroup", "5:devices:/\n4:cpu,memory:/job\n0::/\n"),
                (&limit, limited),
                (&usage, ten),
                (&stat, "inactive_file 9\ntotal_inactive_file 1073741824\ntotal_active_file 0\n"),
            ])
        };
        assert_eq!(group("21474836480\n"), room(20, 5));
        assert_eq!(group("9223372036854771712\n"), room(64, 20));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_something_sensible() {
        let room = of_this_process().unwrap();
        assert!(0 < room.bytes() && room.total_bytes <= machine_bytes().unwrap(), "{room:?}");
    }
}
