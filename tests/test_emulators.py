"""The emulators that other tests stand on answer like the services."""


def test_what_is_published_can_be_taken(pubsub_emulator):
    topic, subscription = pubsub_emulator.create()
    publisher = pubsub_emulator.publisher()
    for future in [publisher.publish(topic, b"image", number=str(n)) for n in range(150)]:
        future.result()
    taken = pubsub_emulator.take(subscription, 150)
    assert sorted(int(m.attributes["number"]) for m in taken) == list(range(150))


def test_beam_reads_what_the_storage_client_wrote(gcs_bucket):
    from apache_beam.io.filesystems import FileSystems

    gcs_bucket.blob("a/b.txt").upload_from_string(b"content")
    with FileSystems.open(f"gs://{gcs_bucket.name}/a/b.txt") as file:
        assert file.read() == b"content"
