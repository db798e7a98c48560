/**
 * Beam's job server for a cluster that has Beam's jars in its own class path, as the one of tests/flink/cluster.py has.
 *
 * <p>Beam's driver sends every jar of its class path along with each job (160 MB), and has no option against it. It finds them by this property;
 * the class loader has read it before. Run as it is, by a JDK: {@code java -cp '.tools/flink/lib/*' deploy/flink/JobServer.java}.
 */
public final class JobServer {
  public static void main(String[] arguments) throws Exception {
    System.setProperty("java.class.path", "");
    org.apache.beam.runners.flink.FlinkJobServerDriver.main(arguments);
  }
}
